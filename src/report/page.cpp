// HORNER_PAGE is the file that cmake/web.cmake builds; the assembler embeds it.
#include "report/page.h"

asm(".pushsection .rodata\n"
    ".global horner_page_begin\n"
    "horner_page_begin:\n"
    ".incbin \"" HORNER_PAGE
    "\"\n"
    ".global horner_page_end\n"
    "horner_page_end:\n"
    ".byte 0\n"
    ".popsection\n");

extern "C" const char horner_page_begin[], horner_page_end[];

namespace horner::report {

std::string_view page() {
  return {horner_page_begin, horner_page_end};
}

}  // namespace horner::report

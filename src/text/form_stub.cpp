// Form C where utf8proc is not installed: only characters that never change.
#include "core/check.h"
#include "text/form.h"

namespace horner::text {

bool stable_in_nfc(char32_t c) {
  return c < 0x300;
}

void append_nfc(std::string_view, std::string&) {
  fail("this text requires Unicode normalization: build with utf8proc (Debian: libutf8proc-dev)");
}

}  // namespace horner::text

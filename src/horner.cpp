// The versions that the installed library is of.
#include "horner.h"

namespace horner {

const char* version() {
  return HORNER_VERSION;
}
const char* torch_version() {
  return HORNER_TORCH;
}

}  // namespace horner

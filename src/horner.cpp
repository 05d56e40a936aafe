// The versions of the installed library and of its torch.
#include "horner.h"

namespace horner {

const char* version() {
  return HORNER_VERSION;
}
const char* torch_version() {
  return HORNER_TORCH;
}

}  // namespace horner

// The emulator has no instructions of Hopper: that execution refuses everything.
#include "attn/exec/exec.h"
#include "core/check.h"

namespace horner::attn::exec {

static std::string why_not(const Spec&, const Inputs&) {
  return "is not emulated";
}
static at::Tensor run(const Spec&, const Inputs&, Statistics*) {
  fail("hopper_cuda is not emulated");
}
const Execution hopper_cuda = complete(kHopperCuda, why_not, run);

}  // namespace horner::attn::exec

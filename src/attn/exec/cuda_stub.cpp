// In place of the *_cuda.cpp sources where torch is built without CUDA.
#include "attn/exec/decode_cuda.h"
#include "attn/exec/delta_cuda.h"
#include "attn/exec/exec.h"
#include "attn/exec/ring.h"
#include "core/check.h"

namespace horner::attn::exec {

static constexpr const char* kReason = "torch was built without CUDA";

static std::string why_not(const Spec&, const Inputs&) {
  return kReason;
}
static at::Tensor run(const Spec&, const Inputs&, Statistics*) {
  fail(kReason);
}
const Execution hopper_cuda = complete(kHopperCuda, why_not, run);
const Execution fused_cuda = complete(kFusedCuda, why_not, run);
const Execution chunked_cuda = complete(kChunkedCuda, why_not, run);

std::string why_not_on_gpu(const StateShape&) {
  return kReason;
}
std::string why_no_linear(const Spec&, const StateShape&) {
  return kReason;
}
Sums step_linear(const Spec&, const Inputs&, Carry&) {
  fail(kReason);
}
at::Tensor attend_round_on_gpu(const Spec&, const Inputs&, const Ring&) {
  fail(kReason);
}
void apply_state_on_gpu(const kernels::Decode<float>&, const at::Tensor&) {
  fail(kReason);
}
void fold_on_gpu(const kernels::Decode<float>&, const at::Tensor&) {
  fail(kReason);
}

}  // namespace horner::attn::exec

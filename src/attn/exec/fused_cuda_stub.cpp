// In place of fused_cuda.cpp where torch is built without CUDA.
#include "attn/exec/exec.h"
#include "core/check.h"

namespace horner::attn::exec {

static constexpr const char* kReason = "this build's torch has no CUDA";

static std::string why_not(const Spec&, const Inputs&) {
  return kReason;
}
static at::Tensor run(const Spec&, const Inputs&, Statistics*) {
  fail(kReason);
}

const Execution fused_cuda{
    .name = "fused_cuda",
    .about = "one pass over tiles of keys, on an NVIDIA GPU (tensor cores, from sm_80 on)",
    .why_not = why_not,
    .run = run,
};
const Execution hopper_cuda{
    .name = "hopper_cuda",
    .about = "the same on an NVIDIA GPU of compute capability 9.0 (wgmma, the copy engine)",
    .why_not = why_not,
    .run = run,
};

}  // namespace horner::attn::exec

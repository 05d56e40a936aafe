// In place of fused_cuda.cpp where torch is built without CUDA.
#include "attn/exec/exec.h"
#include "core/check.h"

namespace horner::attn::exec {

static constexpr const char* kReason = "this build's torch has no CUDA";

const Execution fused_cuda{
    .name = "fused_cuda",
    .about = "one pass over tiles of keys, on an NVIDIA GPU (tensor cores, from sm_80 on)",
    .why_not = [](const Spec&, const Inputs&) { return std::string(kReason); },
    .run = [](const Spec&, const Inputs&, Statistics*) -> at::Tensor { fail(kReason); },
};

}  // namespace horner::attn::exec

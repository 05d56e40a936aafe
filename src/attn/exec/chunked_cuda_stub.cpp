// In place of chunked_cuda.cpp and decode_cuda.cpp where torch is built without CUDA.
#include "attn/exec/decode_cuda.h"
#include "attn/exec/exec.h"
#include "core/check.h"

namespace horner::attn::exec {

static constexpr const char* kReason = "this build's torch has no CUDA";

const Execution chunked_cuda{
    .name = "chunked_cuda",
    .about = "chunks of tokens with a state between them, on an NVIDIA GPU: linear time",
    .why_not = [](const Spec&, const Inputs&) -> std::string { return kReason; },
    .run = [](const Spec&, const Inputs&, Statistics*) -> at::Tensor { fail(kReason); },
    .statistics = false,
};

std::string why_not_on_gpu(const StateShape&) {
  return kReason;
}
void ask_on_gpu(const kernels::Decode<float>&, const at::Tensor&) {
  fail(kReason);
}
void fold_on_gpu(const kernels::Decode<float>&, const at::Tensor&) {
  fail(kReason);
}

}  // namespace horner::attn::exec

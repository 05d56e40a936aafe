// Which Hopper kernels a problem takes, by its dtype.
#include "attn/exec/kernels/fused_cuda_launch.cuh"
#include "attn/exec/kernels/hopper_cuda.h"

namespace horner::attn::kernels::cuda {

template <class F>
static void with_dtype(Dtype dtype, const F& f) {
  if (dtype == Dtype::bfloat16) return f(HopperLaunch<bf16>());
  f(HopperLaunch<fp16>());
}

std::string hopper_why_not(int device) {
  if (compute_capability(device) == 90) return "";
  return "a GPU of compute capability 9.0 is wanted";
}

void hopper_forward(const Fused& f, const Weights& w, Stream stream) {
  with_dtype(f.dtype, [&](auto launch) { launch.forward(f, w, stream); });
}
void hopper_keys(const Fused& f, const Weights& w, Stream stream) {
  with_dtype(f.dtype, [&](auto launch) { launch.keys(with_g(f), w, stream); });
}
void hopper_dq(const Fused& f, Stream stream) {
  with_dtype(f.dtype, [&](auto launch) { launch.dq(f, stream); });
}

}  // namespace horner::attn::kernels::cuda

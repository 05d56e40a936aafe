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

// A block has 128 keys.
static __global__ __launch_bounds__(128) void factors_kernel(const double* decay, const float* gate,
                                                             int S, float* factors) {
  const int blocks = (S + 127) / 128, head = int(blockIdx.x) / blocks;
  const int s = int(blockIdx.x) % blocks * 128 + int(threadIdx.x);
  float y = 0;
  if (s < S) {
    const int64_t at = int64_t(head) * S;
    const int last = min(s / kFactorTile * kFactorTile + kFactorTile, S) - 1;
    y = gate ? gate[at + s] : 1;
    if (decay) y *= exp2f(float((decay[at + last] - decay[at + s]) * 1.4426950408889634));
  }
  factors[int64_t(blockIdx.x) * 128 + threadIdx.x] = y;
}

void hopper_factors(const Fused& f, float* factors, Stream stream) {
  const Grid grid{int64_t(f.B) * f.G * (factor_keys(f) / 128), 1, 128, 0};
  launch(factors_kernel, grid, stream, f.decay, f.gate, f.S, factors);
}
void hopper_forward(const Fused& f, const Weights& w, const float* factors, Stream stream) {
  with_dtype(f.dtype, [&](auto launch) { launch.forward(f, w, factors, stream); });
}
void hopper_keys(const Fused& f, const Weights& w, Stream stream) {
  with_dtype(f.dtype, [&](auto launch) { launch.keys(with_g(f), w, stream); });
}
void hopper_dq(const Fused& f, Stream stream) {
  with_dtype(f.dtype, [&](auto launch) { launch.dq(f, stream); });
}

}  // namespace horner::attn::kernels::cuda

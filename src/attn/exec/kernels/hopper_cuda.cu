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

// A block has one tile of keys.
static __global__ __launch_bounds__(kFadeTile) void fades_kernel(const double* decay, int S,
                                                                 float* fades) {
  const int tiles = (S + kFadeTile - 1) / kFadeTile, head = int(blockIdx.x) / tiles;
  const int first = int(blockIdx.x) % tiles * kFadeTile, s = first + int(threadIdx.x);
  const double* const c = decay + int64_t(head) * S;
  fades[int64_t(blockIdx.x) * kFadeTile + threadIdx.x] =
      s < S ? float((c[first] - c[s]) * 1.4426950408889634) : 0;
}

void hopper_fades(const Fused& f, float* fades, Stream stream) {
  const Grid grid{int64_t(f.B) * f.G * (fade_keys(f) / kFadeTile), 1, kFadeTile, 0};
  launch(fades_kernel, grid, stream, f.decay, f.S, fades);
}
void hopper_forward(const Fused& f, const Weights& w, const float* fades, Stream stream) {
  with_dtype(f.dtype, [&](auto launch) { launch.forward(f, w, fades, stream); });
}
void hopper_keys(const Fused& f, const Weights& w, const float* fades, Stream stream) {
  with_dtype(f.dtype, [&](auto launch) { launch.keys(with_g(f), w, fades, stream); });
}
void hopper_dq(const Fused& f, Stream stream) {
  with_dtype(f.dtype, [&](auto launch) { launch.dq(f, stream); });
}

}  // namespace horner::attn::kernels::cuda

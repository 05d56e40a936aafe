// Selects the Hopper kernels by dtype, and computes the decay factors.
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/hopper/hopper.h"

namespace horner::attn::kernels::cuda {

template <class F>
static void with_launch(Dtype dtype, const F& f) {
  if (dtype == Dtype::bfloat16) return f(HopperLaunch<bf16>());
  f(HopperLaunch<fp16>());
}

std::string hopper_why_not(int device) {
  if (compute_capability(device) == 90) return "";
  return "requires compute capability 9.0";
}

// Each block owns a tile of keys.
static __global__ __launch_bounds__(kFactorTile) void hopper_decay_factors_kernel(
    const double* decay, const float* gate, int S, int tiles, int together, float* factors) {
  const int64_t at = int64_t(blockIdx.x) / tiles * S;
  const int n = int(threadIdx.x), first = int(blockIdx.x) % tiles * kFactorTile, s = first + n;
  const double from = decay[at + min(first / together * together + together, S) - 1];
  const float y = s < S ? gate ? gate[at + s] : 1 : 0;
  const float key = s < S ? float((from - decay[at + s]) * 1.4426950408889634) : 0;
  float* const to = factors + int64_t(blockIdx.x) * kFactorRow;
  to[n] = y * exp2f(key), to[kFactorTile + n] = key, to[2 * kFactorTile + n] = y;
  if (n == 0) *reinterpret_cast<double*>(to + 3 * kFactorTile) = from;
}

void hopper_decay_factors(const Fused& f, const Weights& w, float* factors, Stream stream) {
  const Grid grid{int64_t(f.B) * f.G * factor_tiles(f), 1, kFactorTile, 0};
  const bool in_scores = std::holds_alternative<Exp>(w) && !is_clamped_exp(f, w);
  const int together = in_scores && hopper_channels(f) == 128 ? 128 : kFactorTile;  // keys
  launch(hopper_decay_factors_kernel, grid, stream, f.decay, f.gate, f.S, factor_tiles(f), together,
         factors);
}
void hopper_forward(const Fused& f, const Weights& w, const float* factors, Stream stream) {
  with_launch(f.dtype, [&](auto launch) { launch.forward(f, w, factors, stream); });
}
void hopper_backward(const Fused& f, const Weights& w, Stream stream) {
  with_launch(f.dtype, [&](auto launch) { launch.backward(with_g(f), w, stream); });
}

}  // namespace horner::attn::kernels::cuda

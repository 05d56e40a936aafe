// The kernels of fused_cuda.h again, for GPUs of compute capability 9.0: products by groups of four
// warps, copies by the copy engine, one warp that begins copies beside those that compute.
#pragma once

#include <string>

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

inline constexpr int kMaxHopperChannels = 128;

std::string hopper_why_not(int device);  // "" when these kernels run there

// bfloat16 and float16, Exp and Polynomial. Their dq_sum has rows of so many channels.
inline int hopper_channels(const Fused& f) {
  return f.D <= 64 && f.E <= 64 ? 64 : 128;
}
// With decay, c the running sums of its log gates, what forward multiplies the weights of a key by:
// its input gate and exp(c_ref - c_s), where c_ref is that of the last of its kFactorTile keys:
// [B, G, tiles, kFactorRow], of every tile the factors, c_ref - c_s in units of ln 2, the gates
// (zeros at the end) and c_ref as a double. Null without decay.
inline constexpr int kFactorTile = 64, kFactorRow = 3 * kFactorTile + 4;
HORNER_HD int factor_tiles(const Fused& f) {
  return (f.S + 127) / 128 * 2;
}
// In the range of bfloat16 weights with a clamp need no shift, unless they are divided by their
// sum.
inline constexpr float kBound = 10;
inline bool is_clamped_exp(const Fused& f, const Weights& w) {
  return std::holds_alternative<Exp>(w) && f.dtype == Dtype::bfloat16 && f.clamp <= kBound &&
         !f.epilogue.by_sum;
}
void hopper_decay_factors(const Fused&, float* factors, Stream);
void hopper_forward(const Fused&, const Weights&, const float* factors, Stream);
void hopper_backward(const Fused&, const Weights&, Stream);

// The same of one dtype.
template <class T>
struct HopperLaunch {
  static void forward(const Fused&, const Weights&, const float* factors, Stream);
  static void backward(const Fused&, const Weights&, Stream);
};

}  // namespace horner::attn::kernels::cuda

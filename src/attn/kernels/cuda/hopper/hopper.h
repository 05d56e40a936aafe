// The fused kernels for compute capability 9.0: WGMMA by consumer warpgroups, TMA loads issued by a
// producer warp or by one consumer thread.
#pragma once

#include <string>

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

inline constexpr int kMaxHopperChannels = 128;

std::string hopper_why_not(int device);  // "" if these kernels run there

// bfloat16 and float16, Exp and Polynomial. Rows of their dq_sum have this many channels.
inline int hopper_channels(const Fused& f) {
  return f.D <= 64 && f.E <= 64 ? 64 : 128;
}
// With decay, c being the running sums of its log gates, forward multiplies the weights of a key by
// its input gate and exp(c_ref - c_s), c_ref being that of the last of its kFactorTile keys. [B, G,
// tiles, kFactorRow], for each tile: the factors, c_ref - c_s in units of ln 2, the gates (zeros at
// the end) and c_ref as a double. Null without decay.
inline constexpr int kFactorTile = 64, kFactorRow = 3 * kFactorTile + 4;
HORNER_HD int factor_tiles(const Fused& f) {
  return (f.S + 127) / 128 * 2;
}
// Clamped weights within the range of bfloat16 need no shift, unless they are divided by their sum.
inline constexpr float kBound = 10;
inline bool is_clamped_exp(const Fused& f, const Weights& w) {
  return std::holds_alternative<Exp>(w) && f.dtype == Dtype::bfloat16 && f.clamp <= kBound &&
         !f.epilogue.by_sum && f.softcap == 0;
}
// The keys of exp are relative to the last of the tile of forward, which adds them to the scores.
void hopper_decay_factors(const Fused&, const Weights&, float* factors, Stream);
void hopper_forward(const Fused&, const Weights&, const float* factors, Stream);
void hopper_backward(const Fused&, const Weights&, Stream);

// The launches of one dtype.
template <class T>
struct HopperLaunch {
  static void forward(const Fused&, const Weights&, const float* factors, Stream);
  static void backward(const Fused&, const Weights&, Stream);
};

}  // namespace horner::attn::kernels::cuda

// The kernels of fused_cuda.h again, for GPUs of compute capability 9.0: products by groups of four
// warps, copies by the copy engine, one warp that begins copies beside those that compute.
#pragma once

#include <string>

#include "attn/exec/kernels/fused_cuda.h"

namespace horner::attn::kernels::cuda {

inline constexpr int kMostHopperChannels = 128;

std::string hopper_why_not(int device);  // "" when these kernels run there

// bfloat16 and float16, Exp and Polynomial. Their dq_sum has its own order inside tiles of
// kHopperTile rows and hopper_channels channels: hopper_dq takes it to dq.
inline constexpr int kHopperTile = 64;
inline int hopper_channels(const Fused& f) {
  return f.D <= 64 && f.E <= 64 ? 64 : 128;
}
// With decay, c the running sums of its log gates, each key's c_ref - c_s in units of ln 2, where
// c_ref is that of the first of its kFadeTile keys: [B, G, fade_keys()]; null without.
inline constexpr int kFadeTile = 128;
HORNER_HD int64_t fade_keys(const Fused& f) {
  return (int64_t(f.S) + kFadeTile - 1) / kFadeTile * kFadeTile;
}
void hopper_fades(const Fused&, float* fades, Stream);
void hopper_forward(const Fused&, const Weights&, const float* fades, Stream);
void hopper_keys(const Fused&, const Weights&, const float* fades, Stream);
void hopper_dq(const Fused&, Stream);

}  // namespace horner::attn::kernels::cuda

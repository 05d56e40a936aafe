// Feature maps of queries or keys on an NVIDIA GPU, row by row, memory-bound:
//   y = factor f(x),   f(x) = x, max(x, 0), elu(x) + 1 or x / |x|.
// Backward computes the gradients of x and of the row's factor from dy and x.
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

enum class Map { identity, relu, elu1, cosine, cosine_over_heads };

struct FeatureRows {
  Map map;
  Dtype dtype;
  int B, H, T, D;  // D at most kMaxChannels
  float repeats;   // cosine_over_heads: number of heads that each one stands for
  View x;          // [B, H, T, D]
  // [B, H, T, D padded to a multiple of kPad], rows aligned to kAlignment bytes. Backward: the
  // gradient of y, which dx may alias.
  View y;
  View factor;      // float32 [B, H, T], strides may be 0; null: 1
  View dx;          // [B, H, T, D]
  float* d_factor;  // [B, H, T], or null
};

// Each throws core/check.h's Error if a launch fails.
void map_rows(const FeatureRows&, Stream);
void map_rows_backward(const FeatureRows&, Stream);

}  // namespace horner::attn::kernels::cuda

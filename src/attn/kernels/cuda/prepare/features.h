// Queries or keys before they meet, on an NVIDIA GPU, row by row at the speed of memory:
//   y = factor f(x),   f(x) = x, max(x, 0), elu(x) + 1 or x / |x|,
// and from the gradient of y and x that of x and of the row's factor.
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

enum class Map { identity, relu, elu1, cosine, cosine_over_heads };

struct FeatureRows {
  Map map;
  Dtype dtype;
  int B, H, T, D;  // D at most kMaxChannels
  float repeats;   // cosine_over_heads: for how many heads each one stands
  View x;          // [B, H, T, D]
  // [B, H, T, D padded to a multiple of kPad], rows at multiples of kAlignment bytes. Backward: the
  // gradient of y, and dx may lie in its place.
  View y;
  View factor;      // float32 [B, H, T], strides may be 0; at null: 1
  View dx;          // [B, H, T, D]
  float* d_factor;  // [B, H, T], or null
};

// Each throws core/check.h's Error where the GPU refuses.
void map_rows(const FeatureRows&, Stream);
void map_rows_backward(const FeatureRows&, Stream);

}  // namespace horner::attn::kernels::cuda

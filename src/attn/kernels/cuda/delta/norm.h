// RMSNorm of rows in bfloat16, forward and backward: o = N weight / sqrt(mean N^2 + eps).
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

struct NormedRows {
  int64_t rows;
  int stride, channels;  // of N and dN: 64 or 128 numbers a row, of which `channels` count
  float eps;
  const float* weight;  // [channels]
  const void* N;        // [rows, stride]
  void* o;              // [rows, channels]
  const void* d_o;      // [rows, channels]
  void* dN;             // [rows, stride], 0 beyond `channels`
  float* d_weight;      // [norm_blocks(), stride]: parts of the gradient
};
int norm_blocks(const NormedRows&);

// Each throws core/check.h's Error on failure.
void norm_forward(const NormedRows&, Stream);
void norm_backward(const NormedRows&, Stream);

}  // namespace horner::attn::kernels::cuda

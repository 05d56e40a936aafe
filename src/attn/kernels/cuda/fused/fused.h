// Launches of the fused (Ampere+) kernels, in order. Each throws core/check.h's Error on failure.
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

int fused_shared_memory(Dtype, int channels);  // bytes, the most of any kernel
void find_row_thresholds(const Fused&, const Weights&, bool adaptive, Stream);
void fused_forward(const Fused&, const Weights&, Stream);
void fused_statistics(const Fused&, const Weights&, Stream);   // after forward
void row_gradients(const Fused&, const Weights&, Stream);      // first step of backward
void row_gradient_sums(const Fused&, const Weights&, Stream);  // RuntimeWeight only
void fused_backward(const Fused&, const Weights&, Stream);     // dk, dv and dq_sum
void fused_dq(const Fused&, const Weights&, Stream);           // dq, if dq_sum is null
void unpack_dq(const Fused&, Stream);                          // if dq_in_fragments

// The same for one dtype.
template <class T>
struct FusedLaunch {
  static int shared_memory(int channels);
  static void thresholds(const Fused&, const RuntimeWeight&, bool adaptive, Stream);
  static void forward(const Fused&, const Weights&, Stream);
  static void statistics(const Fused&, const Weights&, Stream);
  static void row_gradients(const Fused&, bool is_exp, Stream);
  static void row_gradient_sums(const Fused&, const RuntimeWeight&, Stream);
  static void backward(const Fused&, const Weights&, Stream);
  static void dq(const Fused&, const Weights&, Stream);
  static void unpack_dq(const Fused&, Stream);
};

}  // namespace horner::attn::kernels::cuda

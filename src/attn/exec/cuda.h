// The tensor code before the CUDA kernels: stages as they take them, tensors as they lie in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "attn/attend.h"
#include "attn/exec/kernels/fused_cuda.h"

namespace horner::attn::exec {

kernels::cuda::Weights cuda_weights(const Weight&);
kernels::cuda::Epilogue cuda_epilogue(const Spec&);         // without its pointers
kernels::cuda::Seen cuda_seen(const Mask&, const Inputs&);  // likewise
bool needs_the_row(const Weight&);                          // more than one score

// Where the packed sequence of each token begins and ends: [T] each, int32.
std::pair<at::Tensor, at::Tensor> sequences(const Inputs&);

// With channels side by side, zeros up to a multiple of kPad, and rows that begin at multiples of
// kAlignment bytes.
at::Tensor laid_out(const at::Tensor&);

// The numbers and sums of the keys that each query sees. Nothing is computed before it is asked
// for: most variants need none of it.
struct CountedKeys {
  CountedKeys(const Mask& mask, const Inputs& in) : mask(mask), in(in) {}

  at::Tensor count() const;                    // [1 or B, 1, T, 1], at least 1
  at::Tensor sums(const at::Tensor& x) const;  // of x [B, G, S, C]: [B, G, T, C], in double
  // What divides a row where that is not its sum: [B, H, T], or undefined for 1.
  at::Tensor divisor(const Spec&, const Inputs&) const;

 private:
  const Mask& mask;
  const Inputs& in;
  mutable at::Tensor lo, hi, ones, counted;

  void find_intervals() const;
  at::Tensor running_sums(const at::Tensor& x) const;
};

}  // namespace horner::attn::exec

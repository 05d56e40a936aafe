// What the torch side of the CPU kernels shares: masks as intervals, and the tensor code before a
// kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include "attn/attend.h"

namespace horner::attn::exec {

// The keys that each query sees, as intervals that never go back; `keep` is apart.
struct Intervals {
  at::Tensor lo, hi;  // [T], int32: lo <= s < hi

  Intervals(const Mask&, const Inputs&);
  at::Tensor sums(
      const at::Tensor& x) const;  // of x [..., S, C] over each query's keys: [..., T, C]
};

// The inputs as the kernels take them, differentiable.
struct Prepared {
  Intervals seen;
  int64_t repeats;    // query heads for each key head
  at::Tensor ones;    // [1 or B, 1, S, 1]: 0 for a key that `keep` hides
  at::Tensor count;   // [1 or B, 1, T, 1]
  at::Tensor q, k;    // features taken
  at::Tensor factor;  // what multiplies q.k: one number, or [1 or B, H, T, 1]
  at::Tensor decay;   // [B, G, S], running sums in double, or undefined

  // After `before` [B] keys, unless that is undefined.
  Prepared(const Spec&, const Inputs&, const at::Tensor& before = {});
  at::Tensor gates(
      const Inputs&) const;  // sums of e^denominator_gate over the keys seen: [B, H, T, 1]
};

// Where a kernel writes the statistics [4, B, H, T], of which `to` gets its parts; undefined for
// null.
at::Tensor statistics_memory(const Inputs&, Statistics* to);

// Throws where a graph of the gradients is wanted: the kernels of that execution have no gradients
// of gradients.
void check_first_order(std::string_view execution);

// With channels of zeros up to a multiple of kernels::kPad, contiguous.
at::Tensor padded(const at::Tensor& x, at::ScalarType = at::kFloat);

// The memory of a tensor; null for none.
template <class T>
T* pointer(const at::Tensor& x) {
  return x.defined() ? x.data_ptr<T>() : nullptr;
}

}  // namespace horner::attn::exec

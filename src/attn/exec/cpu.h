// What the torch side of the CPU kernels shares: tasks for the threads, masks as intervals, and the
// tensor code before a kernel.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

#include "attn/attend.h"

namespace horner::attn::exec {

// Tasks one by one to whichever thread is free: they differ in length. Each thread, of which there
// are at most `threads`, has `scratch` numbers of its own, at the beginning of a vector.
template <class R = float, class F>
void for_each_task(int64_t n, int64_t scratch, const F& f,
                   int64_t threads = std::numeric_limits<int64_t>::max()) {
  constexpr int64_t kRoom = 64 / int64_t(sizeof(R));
  std::atomic<int64_t> next = 0;
  threads = std::min<int64_t>({n, threads, at::get_num_threads()});
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    const std::unique_ptr<R[]> own(scratch ? new R[size_t(scratch + kRoom)] : nullptr);
    R* aligned = reinterpret_cast<R*>((reinterpret_cast<uintptr_t>(own.get()) + 63) / 64 * 64);
    for (int64_t i; (i = next++) < n;) f(i, aligned);
  });
}
template <class F>
void for_each_task(int64_t n, const F& f) {
  for_each_task(n, 0, [&](int64_t i, float*) { f(i); });
}

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

  // After `before` [B] keys, unless that is undefined. `ones` and `count` are left undefined where
  // the caller does not count keys and the factor does not need it.
  Prepared(const Spec&, const Inputs&, const at::Tensor& before = {}, bool counted = true);
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

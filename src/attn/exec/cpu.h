// What the torch side of the CPU kernels shares: tasks for the threads, and masks as intervals.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>

#include "attn/attend.h"

namespace horner::attn::exec {

// Tasks one by one to whichever thread is free: they differ in length.
template <class F>
void for_each_task(int64_t n, const F& f) {
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, std::min<int64_t>(n, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next++) < n;) f(i);
  });
}

// The keys that each query sees, as intervals that never go back; `keep` is apart.
struct Intervals {
  at::Tensor lo, hi;  // [T], int32: lo <= s < hi

  Intervals(const Mask&, const Inputs&);
  at::Tensor sums(const at::Tensor& x) const;  // of x [..., S, C] over each query's keys: [..., T, C]
};

// The memory of a tensor; null for none.
template <class T>
T* pointer(const at::Tensor& x) {
  return x.defined() ? x.data_ptr<T>() : nullptr;
}

}  // namespace horner::attn::exec

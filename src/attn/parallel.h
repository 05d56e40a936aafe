// Independent tasks on torch's threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>

namespace horner::attn {

// Calls f(task, scratch) for every task below n. Tasks differ in length, so each thread takes the
// next one when it is free. Each of the at most `threads` threads has `scratch` numbers of its own,
// aligned to 64 bytes.
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

}  // namespace horner::attn

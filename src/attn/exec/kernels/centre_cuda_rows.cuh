// Sums over intervals of rows. A warp has a chunk of rows, a lane two channels of each. P(j), the
// sum of the rows before j, is that of the chunks before, from memory, and of some rows of the
// next: the sum over [lo, hi) is P(hi) - P(lo). As lo and hi never go back, each row is added once;
// where for every row of a chunk they stand or go one further, which they do but at the ends of
// windows and sequences, eight rows are loaded at once.
#pragma once

#include <type_traits>

#include "attn/exec/kernels/centre_cuda.h"
#include "attn/exec/kernels/fused_cuda_mma.cuh"

namespace horner::attn::kernels::cuda {

constexpr int kChunk = 32;      // rows: a lane for each, where that is all a row needs
constexpr int kAtOnce = 8;      // rows
constexpr int kGroup = 2 * 32;  // channels of a warp
constexpr int kCentreWarps = 4, kCentreThreads = 32 * kCentreWarps;  // of a block
constexpr int kSegments = 16;                                        // of chunks, in `scan_kernel`
constexpr unsigned kAll = ~0u;                                       // lanes

// Blocks on a multiprocessor, at least.
template <class T>
inline constexpr int kCentreBlocks = sizeof(T) == 2 ? 4 : 3;

HORNER_HD int chunks(int rows) {
  return (rows + kChunk - 1) / kChunk;
}
HORNER_HD int groups(const Centre& f) {
  return (f.D + kGroup - 1) / kGroup;
}

// Two neighbours of a row.
template <class T>
struct alignas(2 * sizeof(T)) Two {
  T x, y;
};
template <class T>
__device__ inline Two<T> two(const T* at) {
  return *reinterpret_cast<const Two<T>*>(at);
}
// Sums of rows inside a chunk. Those of chunks are double.
template <class T>
using Sum = std::conditional_t<sizeof(T) == 4, double, float>;
template <class T>
struct Sums {
  Sum<T> x, y;

  __device__ Sums operator+(Sums b) const { return {x + b.x, y + b.y}; }
  __device__ Sums operator-(Sums b) const { return {x - b.x, y - b.y}; }
  __device__ void add(Sum<T> by, const Two<T>& row) {
    if (by != 0) x += by * Sum<T>(float(row.x)), y += by * Sum<T>(float(row.y));
  }
};

// The chunk of a head that a warp has, and a lane's channels: where there are none it has those of
// the row's beginning, and is not `real`.
struct CentrePlace {
  int index, chunk, channel;  // index: of the head, or past the last
  bool real;

  __device__ CentrePlace(const Centre& f, int n, int groups) {
    const int at = int(blockIdx.x) * kCentreWarps + warp(), of_head = n * groups;
    index = at / of_head, chunk = (at - index * of_head) / groups;
    set_group(f, (at - index * of_head) % groups);
  }
  __device__ void set_group(const Centre& f, int group) {
    channel = group * kGroup + 2 * lane();
    real = channel < f.D;
    if (!real) channel = 0;
  }
};
template <class T>
__device__ inline T* channels_of(const View& x, int b, int h, int channel) {
  return static_cast<T*>(x.at) + b * x.batch + h * x.head + channel;
}

__device__ inline float count_of(const Centre& f, int b, int t) {
  return f.count ? f.count[int64_t(b) * f.T + t] : float(max(f.seen.hi(t) - f.seen.lo(t), 1));
}

// Two channels of the rows of head `index` of [B, G], with a factor for each row.
template <class T>
struct Keys {
  const Centre& f;
  int b, g, channel;

  __device__ Keys(const Centre& f, int index, int channel)
      : f(f), b(index / f.G), g(index % f.G), channel(channel) {}
  static HORNER_HD int rows(const Centre& f) { return f.S; }
  __device__ int heads() const { return 1; }
  __device__ float factor(int, int s) const {  // 0 where hidden
    return s >= 0 && s < f.S && !(f.seen.keep && !f.seen.keep[int64_t(b) * f.S + s]) ? 1 : 0;
  }
  __device__ const T* row(int, int s) const {
    return channels_of<T>(f.k, b, g, channel) + min(max(s, 0), f.S - 1) * f.k.row;
  }
};
// Of a group's heads, each query times the gradient of its centre over the count.
template <class T>
struct Queries {
  const Centre& f;
  int b, g, channel;

  __device__ Queries(const Centre& f, int index, int channel)
      : f(f), b(index / f.G), g(index % f.G), channel(channel) {}
  static HORNER_HD int rows(const Centre& f) { return f.T; }
  __device__ int heads() const { return f.H / f.G; }
  __device__ float factor(int h, int t) const {
    if (t < 0 || t >= f.T) return 0;
    return f.d_centre[(int64_t(b) * f.H + g * heads() + h) * f.T + t] / count_of(f, b, t);
  }
  __device__ const T* row(int h, int t) const {
    return channels_of<T>(f.q, b, g * heads() + h, channel) + min(max(t, 0), f.T - 1) * f.q.row;
  }
};

// Adds rows first + r, first + r + 1, ... to those given, for an r that all lanes have. `own` is
// the factor of the first head's row first + lane; rows from `end` on have none.
template <class T, class Rows>
__device__ __forceinline__ void add_rows(const Rows& x, int first, int r, int end, float own,
                                         Sums<T> (&to)[kAtOnce]) {
  for (int h = 0; h < x.heads(); ++h) {
    if (h > 0) own = first + lane() < end ? x.factor(h, first + lane()) : 0;
    Two<T> y[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) y[i] = two(x.row(h, first + r + i));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) to[i].add(__shfl_sync(kAll, own, r + i), y[i]);
  }
}

// P(j) = base + part, for j that never go back.
template <class T, class Rows>
struct Before {
  const Rows& x;
  const double* sums;  // of the head's chunks, from the lane's channels on
  int at = 0;
  double2 base = {};
  Sums<T> part = {};

  __device__ Sums<T> less(const Before& b) const {
    return Sums<T>{Sum<T>(base.x - b.base.x), Sum<T>(base.y - b.base.y)} + (part - b.part);
  }
  __device__ __forceinline__ void to_chunk_of(int j) {
    at = max(j, 0) / kChunk * kChunk;
    base = *reinterpret_cast<const double2*>(sums + int64_t(at / kChunk) * x.f.D);
    part = {};
  }
  __device__ __forceinline__ void start(int j) {
    to_chunk_of(j);
    const float own = at + lane() < j ? x.factor(0, at + lane()) : 0;
#pragma unroll 1
    for (int r = 0; at + r < j; r += kAtOnce) {
      Sums<T> rows[kAtOnce] = {};
      add_rows<T>(x, at, r, j, own, rows);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) part = part + rows[i];
    }
    at = j;
  }
  __device__ __forceinline__ void go_to(int j) {  // by single rows
    if (j / kChunk > at / kChunk) to_chunk_of(j);
#pragma unroll 1
    for (; at < j; ++at)
      for (int h = 0; h < x.heads(); ++h) part.add(x.factor(h, at), two(x.row(h, at)));
  }
};

// The sums over [lo, hi) of the rows x, for the `n` rows from `from` on that the lanes have lo and
// hi of: given to `sink`, some at a time.
template <class T, class Rows, class Sink>
__device__ __forceinline__ void over_intervals(const Rows& x, const double* sums, int from, int n,
                                               int lo, int hi, Sink& sink) {
  const auto follows = [&](int j, int step) {
    return __all_sync(kAll, from + lane() >= n || j == __shfl_sync(kAll, j, 0) + step * lane());
  };
  const bool hi_stands = follows(hi, 0), hi_goes = !hi_stands && follows(hi, 1);
  const bool lo_stands = follows(lo, 0), lo_goes = !lo_stands && follows(lo, 1);
  const bool even = (hi_stands || hi_goes) && (lo_stands || lo_goes);
  const unsigned empty = __ballot_sync(kAll, hi <= lo);
  const int first_hi = __shfl_sync(kAll, hi, 0), first_lo = __shfl_sync(kAll, lo, 0);
  Before<T, Rows> up{x, sums}, down{x, sums};
  const int next = first_hi - hi_goes;  // the row that `up` adds first
  up.start(next), down.start(first_lo);
  const int end = Rows::rows(x.f);
  const float of_up = hi_goes ? x.factor(0, next + lane()) : 0;
  const float of_down = lo_goes ? x.factor(0, first_lo + lane()) : 0;
  for (int r = 0; r < kChunk && from + r < n; r += kAtOnce) {
    sink.load(from + r);
    Sums<T> y[kAtOnce] = {};
    if (even) {
      if (hi_goes) add_rows<T>(x, next, r, end, of_up, y);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) up.part = up.part + y[i], y[i] = up.less(down);
      if (lo_goes) {
        Sums<T> less[kAtOnce] = {}, sum = {};
        add_rows<T>(x, first_lo, r, end, of_down, less);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) y[i] = y[i] - sum, sum = sum + less[i];
        down.part = down.part + sum;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kAtOnce; ++i) {
        const int to = __shfl_sync(kAll, hi, r + i), begin = __shfl_sync(kAll, lo, r + i);
        up.go_to(to), down.go_to(begin);
        const Sums<T> sum = up.less(down);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (j == i) y[j] = sum;
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (empty >> (r + i) & 1) y[i] = {};
    sink.take(from + r, y);
  }
}

}  // namespace horner::attn::kernels::cuda

// Sums over intervals of rows. Each warp owns a chunk of rows, each lane two channels. P(j), the
// sum of the rows before j, is the prefix sum of whole chunks, from memory, plus some rows of the
// next; the sum over [lo, hi) is P(hi) - P(lo). lo and hi never decrease, so each row is added
// once. Where each bound is constant or advances by one per row of the chunk, which is everywhere
// but at the ends of windows and sequences, eight rows are loaded at once.
#pragma once

#include <type_traits>

#include "attn/kernels/cuda/common/tiles.cuh"
#include "attn/kernels/cuda/prepare/centre.h"

namespace horner::attn::kernels::cuda {

constexpr int kChunk = 32;             // rows; one lane per row for scalars
constexpr int kBatch = 8;              // rows
constexpr int kChannelGroup = 2 * 32;  // channels per warp
constexpr int kCentreWarps = 4, kCentreThreads = 32 * kCentreWarps;  // per block
constexpr int kSegments = 16,
              kSegmentThreads = 32 * kSegments;  // of chunks, in centre_scan_kernel
constexpr unsigned kAll = ~0u;                   // all lanes

// Minimum blocks per SM.
template <class T>
inline constexpr int kCentreBlocks = sizeof(T) == 2 ? 4 : 3;

HORNER_HD int chunks(int rows) {
  return (rows + kChunk - 1) / kChunk;
}
HORNER_HD int groups(const Centre& f) {
  return (f.D + kChannelGroup - 1) / kChannelGroup;
}

// Loads two adjacent elements, in program order: the compiler would delay the load of a row that
// may be hidden until it knows, one row after another.
__device__ inline float2 load2(const float* at) {
  float2 y;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];\n" : "=f"(y.x), "=f"(y.y) : "l"(at));
  return y;
}
template <class T>
__device__ inline uint32_t load_b32(const T* at) {
  uint32_t y;
  asm volatile("ld.global.b32 %0, [%1];\n" : "=r"(y) : "l"(at));
  return y;
}
__device__ inline float2 load2(const fp16* at) {
  const uint32_t y = load_b32(at);
  return __half22float2(reinterpret_cast<const __half2&>(y));
}
__device__ inline float2 load2(const bf16* at) {
  const uint32_t y = load_b32(at);
  return make_float2(__uint_as_float(y << 16), __uint_as_float(y & 0xffff0000u));
}
// Sums of rows within a chunk. Sums of chunks are double.
template <class T>
using Sum = std::conditional_t<sizeof(T) == 4, double, float>;
template <class T>
struct Sums {
  Sum<T> x, y;

  __device__ Sums operator+(Sums b) const { return {x + b.x, y + b.y}; }
  __device__ Sums operator-(Sums b) const { return {x - b.x, y - b.y}; }
  __device__ void add(float by, float2 row) { x += Sum<T>(by) * row.x, y += Sum<T>(by) * row.y; }
};

// The chunk of a head that a warp owns, and a lane's channels. A lane without channels reads the
// row's first ones and is not `real`.
struct CentreIndex {
  int index, chunk, channel;  // index: the head, or past the last
  bool real;

  __device__ CentreIndex(const Centre& f, int n, int groups) {
    const int at = int(blockIdx.x) * kCentreWarps + warp(), of_head = n * groups;
    index = at / of_head, chunk = (at - index * of_head) / groups;
    set_group(f, (at - index * of_head) % groups);
  }
  __device__ void set_group(const Centre& f, int group) {
    channel = group * kChannelGroup + 2 * lane();
    real = channel < f.D;
    if (!real) channel = 0;
  }
};
// Rows of one head, at the lane's channels. `row` is in bytes, so that a row's address takes one
// instruction.
template <class T>
struct HeadRows {
  const T* at;
  int row;

  __device__ HeadRows(const View& x, int b, int h, int channel)
      : at(static_cast<const T*>(x.at) + b * x.batch + h * x.head + channel),
        row(int(x.row) * int(sizeof(T))) {}
  __device__ const T* operator[](int i) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(at) + int64_t(i) * row);
  }
};

__device__ inline float count_of(const Centre& f, int b, int t) {
  return f.count ? f.count[int64_t(b) * f.T + t] : float(max(f.seen.hi(t) - f.seen.lo(t), 1));
}

// Two channels of the keys of head `index` of [B, G], with a factor per row.
template <class T>
struct Keys {
  const Centre& f;
  int b;
  HeadRows<T> k;

  __device__ Keys(const Centre& f, int index, int channel)
      : f(f), b(index / f.G), k(f.k, b, index % f.G, channel) {}
  static HORNER_HD int rows(const Centre& f) { return f.S; }
  static constexpr bool kOnes = true;  // factors are 0 or 1
  __device__ int heads() const { return 1; }
  __device__ float factor(int, int s) const {  // 0 where hidden
    return s < f.S && !(f.seen.keep && !f.seen.keep[int64_t(b) * f.S + s]) ? 1 : 0;
  }
  __device__ const T* row(int, int s) const { return k[min(s, f.S - 1)]; }
};
// Each query of a group's heads, times the gradient of its centre over the count.
template <class T>
struct Queries {
  const Centre& f;
  int b, g;
  HeadRows<T> q;  // of the group's first head

  __device__ Queries(const Centre& f, int index, int channel)
      : f(f), b(index / f.G), g(index % f.G), q(f.q, b, g * heads(), channel) {}
  static HORNER_HD int rows(const Centre& f) { return f.T; }
  static constexpr bool kOnes = false;
  __device__ int heads() const { return f.H / f.G; }
  __device__ float factor(int h, int t) const {
    if (t >= f.T) return 0;
    return f.d_centre[(int64_t(b) * f.H + g * heads() + h) * f.T + t] / count_of(f, b, t);
  }
  __device__ const T* row(int h, int t) const { return q[min(t, f.T - 1)] + h * f.q.head; }
};

// Rows from `first` on, one per lane, valid before `end`: the factors of one head's rows, and a bit
// for each that is not 0.
template <class Rows>
struct RowBatch {
  const Rows& x;
  int first, end;
  float own;
  unsigned bits;

  __device__ RowBatch(const Rows& x, int first, int end) : x(x), first(first), end(end) { set(0); }
  __device__ void set(int h) {
    own = first + lane() < end ? x.factor(h, first + lane()) : 0;
    bits = __ballot_sync(kAll, own != 0);
  }
  // Adds eight rows, from r on, to `to`.
  template <class T>
  __device__ __forceinline__ void add(int r, Sums<T> (&to)[kBatch]) {
    for (int h = 0; h < x.heads(); ++h) {
      if (x.heads() > 1) set(h);
      float2 y[kBatch];
      const unsigned real = bits >> r;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) y[i] = load2(x.row(h, first + r + i));
      float by[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) by[i] = Rows::kOnes ? 1 : __shfl_sync(kAll, own, r + i);
      constexpr unsigned kWhole = (1u << kBatch) - 1;
      if ((real & kWhole) == kWhole) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) to[i].add(by[i], y[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (real >> i & 1) to[i].add(by[i], y[i]);
      }
    }
  }
};

// P(j) = base + part, for non-decreasing j.
template <class T, class Rows>
struct PrefixSum {
  const Rows& x;
  const double* sums;  // prefix sums of the head's chunks, at the lane's channels
  int at = 0;
  double2 base = {};
  Sums<T> part = {};

  __device__ Sums<T> minus(const PrefixSum& b) const {
    return Sums<T>{Sum<T>(base.x - b.base.x), Sum<T>(base.y - b.base.y)} + (part - b.part);
  }
  __device__ __forceinline__ void seek_chunk(int j) {
    at = j / kChunk * kChunk;
    base = *reinterpret_cast<const double2*>(sums + int64_t(j / kChunk) * x.f.D);
    part = {};
  }
  __device__ __forceinline__ void start(int j) {
    seek_chunk(j);
    if (at == j) return;
    RowBatch<Rows> run(x, at, j);
#pragma unroll 1
    for (int r = 0; at + r < j; r += kBatch) {
      Sums<T> rows[kBatch] = {};
      run.add(r, rows);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) part = part + rows[i];
    }
    at = j;
  }
  __device__ __forceinline__ void seek(int j) {  // row by row
    if (j / kChunk > at / kChunk) seek_chunk(j);
#pragma unroll 1
    for (; at < j; ++at)
      for (int h = 0; h < x.heads(); ++h)
        if (const float by = x.factor(h, at); by != 0) part.add(by, load2(x.row(h, at)));
  }
};

// How a bound changes over the valid rows of a chunk; it advances only from `least` on.
struct BoundPattern {
  int first;
  bool constant, advances;

  __device__ BoundPattern(int j, bool counts, int least) : first(__shfl_sync(kAll, j, 0)) {
    constant = __all_sync(kAll, !counts || j == first);
    advances = __all_sync(kAll, !counts || j == first + lane()) && !constant && first >= least;
  }
  __device__ bool is_regular() const { return constant || advances; }
};

// Gives `sink` the sums of x over [lo, hi) for the rows [from, n) of a chunk, kBatch at a time.
// Lane i holds lo and hi of row from + i.
template <class T, class Rows, class Sink>
__device__ __forceinline__ void over_intervals(const Rows& x, const double* sums, int from, int n,
                                               int lo, int hi, Sink& sink) {
  const BoundPattern end(hi, from + lane() < n, 1), begin(lo, from + lane() < n, 0);
  const unsigned empty = __ballot_sync(kAll, hi <= lo);
  const bool is_regular = end.is_regular() && begin.is_regular();
  PrefixSum<T, Rows> up{x, sums}, down{x, sums};
  up.start(end.first - end.advances), down.start(begin.first);
  // Rows added before a sum is used, and rows subtracted after it.
  RowBatch<Rows> next(x, end.first - 1, end.advances ? Rows::rows(x.f) : -1);
  RowBatch<Rows> last(x, begin.first, begin.advances ? Rows::rows(x.f) : -1);
  Sums<T> sum = up.minus(down);
#pragma unroll 1
  for (int r = 0; r < kChunk && from + r < n; r += kBatch) {
    sink.load(from + r);
    Sums<T> y[kBatch] = {}, removed[kBatch] = {};
    if (is_regular) {
      if (end.advances) next.add(r, y);
      if (begin.advances) last.add(r, removed);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) y[i] = sum + y[i], sum = y[i] - removed[i];
    } else {
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i) {
        up.seek(__shfl_sync(kAll, hi, r + i)), down.seek(__shfl_sync(kAll, lo, r + i));
        sum = up.minus(down);
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          if (j == i) y[j] = sum;
      }
    }
    if (empty)
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (empty >> (r + i) & 1) y[i] = {};
    sink.take(from + r, y);
  }
}

}  // namespace horner::attn::kernels::cuda

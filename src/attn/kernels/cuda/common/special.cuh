// What only the special kernels have: masks as lists of bounds, and dropout. The other kernels take
// `f.seen` where these take `f` (`sight`): which, is known at compile time, so that what is here
// costs the others nothing.
#pragma once

#include "attn/dropout.h"
#include "attn/kernels/cuda/common/tiles.cuh"

namespace horner::attn::kernels::cuda {

template <class Shape>
struct Special : Shape {
  static constexpr bool kSpecial = true;
};
template <class Shape>
inline constexpr bool kIsSpecial = requires { Shape::kSpecial; };

template <class Shape>
__device__ __forceinline__ const auto& sight(const Fused& f) {
  if constexpr (kIsSpecial<Shape>)
    return f;
  else
    return f.seen;
}

// Masks: lo <= s < hi and from <= s < to.
__device__ inline int lo_of(const Fused& f, int t) {
  return f.lists.lo ? f.lists.lo[t] : f.seen.lo(t);
}
__device__ inline int hi_of(const Fused& f, int b, int t) {
  return f.lists.lo ? f.lists.hi[int64_t(b) * f.lists.hi_batch + t] : f.seen.hi(t);
}
__device__ inline int first_key(const Fused& f, int t) {
  return f.lists.from ? f.lists.from[t] : lo_of(f, t);
}
struct KeysOfQuery {
  int lo, hi, from = 0, to = 0;

  __device__ KeysOfQuery(const Fused& f, int b, int t) : lo(lo_of(f, t)), hi(hi_of(f, b, t)) {
    if (f.lists.from) from = f.lists.from[t], to = f.lists.to[t];
  }
  __device__ bool has(int s) const { return (s >= lo && s < hi) || (s >= from && s < to); }
};

// No query of a block sees the keys between the first ones of all and the others of its first
// query: lo and to do not decrease.
struct Gap {
  int begin, end;
};
__device__ inline Gap gap_of(const Fused& f, int t0, int last) {
  return f.lists.from ? Gap{f.lists.to[last], lo_of(f, t0)} : Gap{0, 0};
}
template <int n>
struct KeyTilesWithGap : KeyTiles<n> {
  Gap gap;  // its end is a tile's first key

  __device__ int after(int s0) const {
    const int next = s0 + n;
    return next >= gap.begin && next < gap.end ? gap.end : next;
  }
};
template <int n>
__device__ inline KeyTilesWithGap<n> key_tiles(const Fused& f, int b, int t0, int last) {
  const Gap gap = gap_of(f, t0, last);
  return {{first_key(f, t0) / n * n, hi_of(f, b, last)}, {gap.begin, gap.end / n * n}};
}
struct VisibleKeys : VisibleRange {
  Gap gap;

  __device__ bool has_none(int begin, int end) const {
    return VisibleRange::has_none(begin, end) || (begin >= gap.begin && end <= gap.end);
  }
};
__device__ inline VisibleKeys keys_seen_by(const Fused& f, int b, int t0, int t1) {
  if (t0 >= f.T) return {};
  const int last = min(t1, f.T) - 1;
  return {{first_key(f, t0), hi_of(f, b, last), lo_of(f, last), f.seen.keep ? 0 : hi_of(f, b, t0)},
          gap_of(f, t0, last)};
}
template <int n>
__device__ inline uint32_t seen_keys(const Fused& f, int b, int t, int first) {
  const KeysOfQuery keys(f, b, min(t, f.T - 1));
  uint32_t bits = keys_within<n>(keys.lo, keys.hi, first);
  if (f.lists.from) bits |= keys_within<n>(keys.from, keys.to, first);
  return kept_of<n>(f.seen, b, first, bits);
}

// The queries that see keys [s0, s1), by all lanes of a warp. The first keys are seen for longer
// than those after them: the ends are not in order.
__device__ inline VisibleRange queries_that_see(const Fused& f, int b, int s0, int s1) {
  if (!f.lists.lo) return queries_that_see(f.seen, s0, s1);
  if (s0 >= f.S) return {0, 0, 0, 0};
  const int end = min(s1, f.S);
  const int32_t* const first = f.lists.first_query + int64_t(b) * f.lists.first_batch;
  int most = 0, least = INT_MAX;
  for (int s = s0 + lane(); s < end; s += 32)
    most = max(most, f.lists.end_query[s]), least = min(least, f.lists.end_query[s]);
  most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
  return {first[s0], most, first[end - 1], end == s1 && !f.seen.keep ? least : 0};
}

// Dropout.
__device__ inline uint64_t dropout_head(const Fused& f, const Head& head) {
  return attn::dropout_head(uint64_t(*f.dropout.seed), head.b, head.h);
}
__device__ inline bool is_dropped(const Fused& f, DropoutRow row, int s) {
  return dropout_bits(row, uint32_t(s)) < f.dropout.below;
}
// Zeroes the weights of dropped pairs: a thread's rows t, t + 8, t + 16, ... and keys from `first`.
template <int atoms, int n>
__device__ __forceinline__ void drop_pairs(const Fused& f, uint64_t head, int t, int first,
                                           float (&x)[atoms][n][4]) {
#pragma unroll
  for (int i = 0; i < 2 * atoms; ++i) {
    const DropoutRow row = dropout_row(head, t + 8 * i);
#pragma unroll
    for (int j = 0; j < 2 * n; ++j)
      if (is_dropped(f, row, first + j / 2 * 8 + j % 2)) x[i / 2][j / 2][i % 2 * 2 + j % 2] = 0;
  }
}
// The rows of 32 queries from t on, one in each lane.
struct DropoutLanes {
  DropoutRow own;

  __device__ DropoutLanes(const Fused& f, const Head& head, int t)
      : own(f.dropout.seed ? dropout_row(dropout_head(f, head), t + lane()) : DropoutRow{}) {}
  __device__ DropoutRow of(int n) const {  // of query t + n; by all lanes of a warp
    return {__shfl_sync(~0u, own.first, n), __shfl_sync(~0u, own.second, n)};
  }
};

}  // namespace horner::attn::kernels::cuda

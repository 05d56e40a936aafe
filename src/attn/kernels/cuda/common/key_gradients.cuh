// What a block of keys gathers from the queries that see it. Scores are taken transposed, keys by
// queries: weights and gradients of scores then stay in registers as the left factors of
//   dv += w^T dN  and  dk += dx^T q.
#pragma once

#include "attn/kernels/cuda/common/score_gradient.cuh"

namespace horner::attn::kernels::cuda {

// What the keys of a warp gather. Where two warps share their keys, each takes the scores of half
// of the queries and has the sums of half of the channels: what one has weighed it writes for both.
template <class T, int C, class W, class Shape>
struct KeySums : KeyGrades<T, C, W, Shape> {
  using Grades = KeyGrades<T, C, W, Shape>;
  using Grades::kAtoms, Grades::kTiles, Grades::kSharing, Grades::kPart, Grades::kChannels,
      Grades::kBeside, Grades::f, Grades::w, Grades::s0, Grades::own, Grades::part, Grades::column,
      Grades::sight, Grades::d_decay, Grades::key;
  using typename Grades::Factors, typename Grades::Products, typename Grades::Queries;
  float dk[kAtoms][kChannels / 8][4], dv[kAtoms][kChannels / 8][4];

  __device__ KeySums(const Fused& f, const W& w, int s0, int first)
      : Grades(f, w, s0, first), dk{}, dv{} {}

  // Adds a tile of queries. `weight` is w, or says its degree; `careful` is for decay and centred
  // scores, `falls` where those have a kernel.
  template <bool careful, bool falls = false, class Weight>
  __device__ __forceinline__ void add(const Weight& weight, const Queries& tile, Tile<T, C> k,
                                      Tile<T, C> v) {
    const typename Mma<T>::template Writer<Shape::kQueries> to_dx(tile.dx, own), to_w(tile.w, own);
#pragma unroll 1
    for (int i = 0; i < kPart / Shape::kStep; ++i) {
      const int at = part * kPart + i * Shape::kStep, t = tile.t0 + at, t1 = t + Shape::kStep;
      if (sight.nothing_of(t, t1)) {
        const Factors zeros = {};
        if (kSharing > 1) write(to_w, at, zeros);
        if (kSharing > 1 || f.dq_sum) write(to_dx, at, zeros);
        continue;
      }
      Products x;
      rows_by_rows<T>(x, k, own, tile.q, at);
      Factors aw, dx;
      if constexpr (falls || careful || !kBeside) {
        Products dp;
        rows_by_rows<T>(dp, v, own, tile.g, at);
        this->template grade_with_care<careful, falls>(weight, tile, at, x, dp, aw, dx);
      } else {
        f.clamp < INFINITY
            ? this->template grade_beside<Care::clamp>(weight, tile, at, v, x, aw, dx)
            : this->template grade_beside<Care::none>(weight, tile, at, v, x, aw, dx);
      }
      if (!falls && !careful && !sight.all_of(t, t1)) this->hide(tile, at, aw, dx);
      if (kSharing > 1) write(to_w, at, aw);
      if (kSharing > 1 || f.dq_sum) write(to_dx, at, dx);
      add_sums_by_columns<T>(dv, aw, tile.g, at, column);
      add_sums_by_columns<T>(dk, dx, tile.q, at, column);
    }
  }
  __device__ __forceinline__ void add(const Queries& tile, Tile<T, C> k, Tile<T, C> v) {
    is_careful(f) ? add<true>(w, tile, k, v) : add<false>(w, tile, k, v);
  }
  template <class Writer>
  static __device__ __forceinline__ void write(const Writer& to, int at, const Factors& x) {
#pragma unroll
    for (int i = 0; i < kAtoms; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) to.put(16 * i, at + 8 * j, x[i] + j);
  }
  // What the other warp has written.
  __device__ __forceinline__ void add_shared(const Queries& tile) {
    static_assert(kSharing == 2);
    const int at = (1 - part) * kPart;
    add_rows_by_columns<kPart>(dv, tile.w, own, tile.g, at, column);
    add_rows_by_columns<kPart>(dk, tile.dx, own, tile.q, at, column);
  }

  __device__ void finish_decay(const Head& head, double* shared) const {  // [kKeys]
    static_assert(kSharing == 1 || 2 * Shape::kQueries >= Shape::kKeys);
    for (int from = kSharing - 1; from >= 0; --from) {
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) {
        double d = d_decay[i / 2][i % 2];
        d += __shfl_xor_sync(~0u, d, 1);
        d += __shfl_xor_sync(~0u, d, 2);
        if (part != from || lane() % 4 != 0) continue;
        if (from + 1 < kSharing) d += shared[key(i) - s0];
        if (from > 0) shared[key(i) - s0] = d;
        if (from == 0 && column == 0 && key(i) < f.S) f.d_decay_key[head.key(f, key(i))] = -d;
      }
      if (kSharing > 1) __syncthreads();
    }
  }
  // The gradient of a gate is what its value gathers without it, times the value: of at most two
  // who have some of the channels, each adds its own, so that the bits are the same every time.
  __device__ __forceinline__ void finish_gates(const Head& head) {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      const int s = min(key(i), f.S - 1);
      const T* const v = row_of<T>(f.v, head.b, head.g, s);
      const float gate = gate_of_key(f, head, s);
      std::conditional_t<sizeof(T) == 4, double, float> sum = 0;
#pragma unroll
      for (int j = 0; j < kChannels / 4; ++j) {
        const int c = column + j / 2 * 8 + lane() % 4 * 2 + j % 2;
        float& x = dv[i / 2][j / 2][i % 2 * 2 + j % 2];
        if (c < f.E) sum += decltype(sum)(x) * decltype(sum)(float(v[c]));
        x *= gate;
      }
      for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane() % 4 == 0 && key(i) < f.S) atomicAdd(f.d_gate + head.key(f, s), float(sum));
    }
  }
  __device__ __forceinline__ void finish(const Head& head, double* shared) {
    if (f.d_decay_key) finish_decay(head, shared);
    if (f.gate) finish_gates(head);
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      const bool wanted = key(i) < f.S;
      const int64_t at = head.key(f, min(key(i), f.S - 1));
#pragma unroll
      for (int j = 0; j < kChannels / 8; j += 4) {
        float k[8], v[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          k[c] = dk[i / 2][j + c / 2][i % 2 * 2 + c % 2] * f.scale;
          v[c] = dv[i / 2][j + c / 2][i % 2 * 2 + c % 2];
        }
        const int first = column + 8 * j;
        store_32<T>(f.dk, at * f.D + first, f.D - first, wanted, k);
        store_32<T>(f.dv, at * f.E + first, f.E - first, wanted, v);
      }
    }
  }
};

}  // namespace horner::attn::kernels::cuda

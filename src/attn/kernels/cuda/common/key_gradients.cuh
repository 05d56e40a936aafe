// Gradients of a block of keys, summed over the queries that see it. Scores are transposed, keys by
// queries: weights and score gradients stay in registers as A operands of
//   dv += w^T dN  and  dk += dx^T q.
#pragma once

#include "attn/kernels/cuda/common/score_gradient.cuh"

namespace horner::attn::kernels::cuda {

// Accumulators of a warp's keys. If two warps share their keys, each computes the scores of half of
// the queries, writes the weights for both, and accumulates half of the channels.
template <class T, int C, class W, class Shape>
struct KeyGradients : KeyScoreGradients<T, C, W, Shape> {
  using Base = KeyScoreGradients<T, C, W, Shape>;
  using Base::kAtoms, Base::kTiles, Base::kSharing, Base::kPart, Base::kChannels, Base::kOverlaps,
      Base::f, Base::w, Base::s0, Base::own, Base::part, Base::column, Base::visible, Base::d_decay,
      Base::key;
  using typename Base::Fragments, typename Base::Products, typename Base::Queries;
  float dk[kAtoms][kChannels / 8][4], dv[kAtoms][kChannels / 8][4];

  __device__ KeyGradients(const Fused& f, const W& w, int s0, int first)
      : Base(f, w, s0, first), dk{}, dv{} {}

  // Adds a tile of queries. `weight` is w, or specialized by degree; `general` is for decay and
  // centres with a gradient, `factored` where they have a separate kernel.
  template <bool general, bool factored = false, class Weight>
  __device__ __forceinline__ void add(const Weight& weight, const Queries& tile, Tile<T, C> k,
                                      Tile<T, C> v) {
    const typename Mma<T>::template Writer<Shape::kQueries> to_dx(tile.dx, own), to_w(tile.w, own);
#pragma unroll 1
    for (int i = 0; i < kPart / Shape::kStep; ++i) {
      const int at = part * kPart + i * Shape::kStep, t = tile.t0 + at, t1 = t + Shape::kStep;
      if (visible.has_none(t, t1)) {
        const Fragments zeros = {};
        if (kSharing > 1) write(to_w, at, zeros);
        if (kSharing > 1 || f.dq_sum) write(to_dx, at, zeros);
        continue;
      }
      Products x;
      mma_abt<T>(x, k, own, tile.q, at);
      Fragments aw, dx;
      if constexpr (factored || general || !kOverlaps) {
        Products dp;
        mma_abt<T>(dp, v, own, tile.g, at);
        this->template gradients<general, factored>(weight, tile, at, x, dp, aw, dx);
      } else {
        f.clamp < INFINITY
            ? this->template overlapped_gradients<Path::clamp>(weight, tile, at, v, x, aw, dx)
            : this->template overlapped_gradients<Path::plain>(weight, tile, at, v, x, aw, dx);
      }
      if (!factored && !general && !visible.has_all(t, t1)) this->hide(tile, at, aw, dx);
      if (kSharing > 1) write(to_w, at, aw);
      if (kSharing > 1 || f.dq_sum) write(to_dx, at, dx);
      mma_ab_rs<T>(dv, aw, tile.g, at, column);
      mma_ab_rs<T>(dk, dx, tile.q, at, column);
    }
  }
  __device__ __forceinline__ void add(const Queries& tile, Tile<T, C> k, Tile<T, C> v) {
    sums_general_gradients(f) ? add<true>(w, tile, k, v) : add<false>(w, tile, k, v);
  }
  template <class Writer>
  static __device__ __forceinline__ void write(const Writer& to, int at, const Fragments& x) {
#pragma unroll
    for (int i = 0; i < kAtoms; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) to.put(16 * i, at + 8 * j, x[i] + j);
  }
  // Adds what the other warp wrote.
  __device__ __forceinline__ void add_shared(const Queries& tile) {
    static_assert(kSharing == 2);
    const int at = (1 - part) * kPart;
    mma_ab_ss<kPart>(dv, tile.w, own, tile.g, at, column);
    mma_ab_ss<kPart>(dk, tile.dx, own, tile.q, at, column);
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
  // The gradient of a gate is v . dv before the gate. At most two contributors hold a key's
  // channels and each adds once, so the result is bitwise reproducible.
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

// Backward on Hopper: each thread block owns 128 keys of one key head, 64 per consumer warpgroup; a
// producer warp loads the tiles of queries that see them. Scores are transposed, as in
// fused/backward.cuh: w and dx stay in registers as A operands, and dx also goes to shared memory
// for dq = dx k. With 64 channels a third warpgroup computes dq, so that none waits for another;
// with 128 no registers are left for it, and each consumer computes half of dq's channels.
#pragma once

#include "attn/kernels/cuda/hopper/score_gradient.cuh"

namespace horner::attn::kernels::cuda {

// Issues keys by queries, summed over the channels.
template <class T, int C, int R, int S, int columns>
__device__ inline void wgmma_abt(float (&x)[columns][4], SwizzledTile<R, C> a, int row,
                                 SwizzledTile<S, C> b) {
  wgmma_ss<T, false, Major::k, Major::k>(x, a.k_major(row, 0), b.k_major(0, 0));
#pragma unroll
  for (int i = 1; i < C / 16; ++i)
    wgmma_ss<T, true, Major::k, Major::k>(x, a.k_major(row, i), b.k_major(0, i));
  wgmma_commit();
}

// With 64 channels, polynomials of low degree hold their keys in registers as A operands, which
// halves shared-memory reads. Higher degrees and exp are no faster that way.
template <class Weight>
inline constexpr bool kKeysInRegs = false;
template <int degree>
inline constexpr bool kKeysInRegs<FixedDegree<degree>> = degree == 2 || degree == 3 || degree == 4;
template <int degree>
inline constexpr bool kKeysInRegs<MaxDegree<degree>> = true;
template <>
inline constexpr bool kKeysInRegs<Linear> = true;

// Loads a warp's rows of a tile as A operands.
template <int R, int C>
__device__ __forceinline__ void load_a_operand(uint32_t (&x)[C / 16][4], SwizzledTile<R, C> a) {
  const int row = warp() * 16 + lane() % 16;
#pragma unroll
  for (int j = 0; j < C / 16; ++j) {
    const int c = 2 * j + lane() / 16;
    const uint32_t at =
        a.at + uint32_t(c / 8 * a.kColumnBytes + row * 128 + ((c % 8 ^ (row & 7)) << 4));
    ldmatrix(x[j], at);
  }
}
// Issues their product with the rows of another tile.
template <class T, int S, int C>
__device__ inline void wgmma_abt_rs(float (&x)[8][4], const uint32_t (&a)[C / 16][4],
                                    SwizzledTile<S, C> b) {
  wgmma_rs_set<T, Major::k>(x, a[0], b.k_major(0, 0));
#pragma unroll
  for (int i = 1; i < C / 16; ++i) wgmma_rs<T, Major::k>(x, a[i], b.k_major(0, i));
  wgmma_commit();
}

// Issues dq of a tile, `columns` * 8 channels from `channel` on, then adds it to global memory.
// `summed`: eight more columns, each the sum of dx.
template <class T, int C, int columns, bool summed = false>
struct DqAccumulator {
  float dq[columns + summed][4];

  __device__ void begin(BackwardMemory<C> memory, int i, int channel) {
    using Shape = HopperBackwardShape<C>;
    const auto dx = memory.dx(i % 2);
    const auto k = memory.k();
    const auto b_operand = [&](int s) {
      if constexpr (summed) return k.mn_major_and(memory.ones(), s);
      return k.mn_major(channel, s);
    };
    wgmma_fence();
    wgmma_ss<T, false, Major::mn, Major::mn>(dq, dx.mn_major(0, 0), b_operand(0));
#pragma unroll
    for (int s = 1; s < Shape::kKeys / 16; ++s)
      wgmma_ss<T, true, Major::mn, Major::mn>(dq, dx.mn_major(0, s), b_operand(s));
  }
  // Adds to [tile][column / 8][thread][4], or to its half `part`, by TMA reduction through slot 0
  // or 1 of shared memory.
  __device__ void add(const Fused& f, BackwardMemory<C> memory, int b, const QueryTile& at,
                      int slot, int barrier, int part = 0) const {
    constexpr int kBytes = columns * 128 * 16;
    const int64_t tiles = (f.T + 63) / 64, tile = int64_t(b * f.H + at.h) * tiles + at.t0 / 64;
    const uint32_t from = memory.sums() + uint32_t(slot * kBytes);
#pragma unroll
    for (int j = 0; j < columns; ++j)
      store_float4(from + uint32_t((j * 128 + int(threadIdx.x) % 128) * 16), dq[j]);
    fence_async_proxy();
    named_barrier_sync<128>(barrier);
    if (threadIdx.x % 128 == 0)
      tma_reduce_add(f.dq_sum + (tile * (C / 8) + part * columns) * 512, from, kBytes);
  }
};

// The warpgroup that computes dq.
template <class T, class W, bool summed, int C>
__device__ __forceinline__ void dq_warpgroup(const Fused& f, const BackwardMemory<C>& given,
                                             const QueryTiles& tiles) {
  QueryTile now(tiles);
  if (!f.dq_sum || !now.inside(tiles)) return;
  DqAccumulator<T, C, C / 8, summed> sums;
  mbarrier_wait(given.keys_full(), 0);
#pragma unroll 1
  for (int i = 0; now.inside(tiles); now.advance(tiles), ++i) {
    const BackwardMemory<C> memory = given.in_round(i);
    mbarrier_wait(memory.dx_full(i % 2), i / 2 & 1);
    sums.begin(memory, i, 0);
    wgmma_commit();
    wgmma_wait<0>();
    register_fence(sums.dq);
    mbarrier_arrive_warp(memory.dx_free(i % 2));
    if constexpr (summed) add_sums<W>(f, tiles.b, now.h, now.t0, sums.dq[C / 8]);
    if (threadIdx.x % 128 == 0) tma_reduce_wait<1>();
    named_barrier_sync<128>(2);
    sums.add(f, memory, tiles.b, now, i % 2, 3);
  }
  if (threadIdx.x % 128 == 0) tma_reduce_wait<0>();
}

// Issues C += x y: x is an A operand in registers, y rows of queries.
template <class T, int columns, int steps, int R, int C>
__device__ __forceinline__ void wgmma_ab_rs(float (&c)[columns][4], const uint32_t (&x)[steps][4],
                                            SwizzledTile<R, C> y) {
#pragma unroll
  for (int j = 0; j < steps; ++j) wgmma_rs<T, Major::mn>(c, x[j], y.mn_major(0, j));
}

// Issues c += x times ones.
template <class T, int steps>
__device__ __forceinline__ void wgmma_sums_rs(float (&c)[1][4], const uint32_t (&x)[steps][4],
                                              uint32_t ones) {
#pragma unroll
  for (int j = 0; j < steps; ++j) wgmma_rs<T, Major::k>(c, x[j], ones_desc(ones));
}

// Stores dx of a warp's keys to shared memory, for dq = dx k.
template <int R, int C, int steps>
__device__ __forceinline__ void store_dx(SwizzledTile<R, C> dx, const uint32_t (&x)[steps][4]) {
  const int key = warp() * 16 + lane() % 16;  // the row that this lane addresses
#pragma unroll
  for (int j = 0; j < steps; ++j)
    stmatrix(dx.at + uint32_t(key * 128 + (((2 * j + lane() / 16) ^ (key & 7)) << 4)), x[j]);
  fence_async_proxy();
}

// Gradients of the input gates: v . dv before the gate. Gradients of the decay: v . dv times the
// gate, the sum of a key's weights times their gradients.
template <class T, bool has_decay, int C, int columns>
__device__ __forceinline__ void store_gates(const Fused& f, const BackwardMemory<C>& memory,
                                            const Head& head, int s0,
                                            const float (&dv)[columns][4]) {
  const auto v = memory.v();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp() * 16 + lane() / 4 + 8 * i;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      const uint32_t word = load_word(v.at + uint32_t(j / 8 * v.kColumnBytes + row * 128 +
                                                      ((j % 8 ^ (row & 7)) << 4) + lane() % 4 * 4));
      const T* const y = reinterpret_cast<const T*>(&word);
      sum += dv[j][2 * i] * float(y[0]) + dv[j][2 * i + 1] * float(y[1]);
    }
    sum = quad_sum(sum);
    if (lane() % 4 == 0 && s0 + row < f.S) {
      if (!has_decay || f.gate) f.d_gate[head.key(f, s0 + row)] = sum;
      if (has_decay && f.d_decay_key) {
        const float gate = f.gate ? gate_of_key(f, head, s0 + row) : 1;
        f.d_decay_key[head.key(f, s0 + row)] = -double(sum) * gate;
      }
    }
  }
  __syncwarp();
}

// The keys' part of the gradient of a decay in the scores: KeyAccumulators.
__device__ __forceinline__ void store_decay(const Fused& f, const Head& head, int key,
                                            const float (&of_dx)[1][4], const float (&decay)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = of_dx[0][2 * i] + quad_sum(decay[i]);
    if (lane() % 4 == 0 && key + 8 * i < f.S) f.d_decay_key[head.key(f, key + 8 * i)] = -sum;
  }
}

// Stores a warp's sums through the warpgroup's values in shared memory, no longer read by WGMMA.
template <class T, int C, int columns>
__device__ __forceinline__ void store_keys(const Fused& f, float scale,
                                           const BackwardMemory<C>& memory, const QueryTiles& tiles,
                                           float (&dk)[columns][4], const float (&dv)[columns][4]) {
#pragma unroll
  for (int j = 0; j < 4 * columns; ++j) dk[j / 4][j % 4] *= scale;
  const int first = tiles.s0 + warp() * 16;
  const int64_t at = Head(tiles.b, 0, tiles.g).key(f, first);
  store_rows<T>(memory.v(), warp() * 16, dv, f.dv, at, f.E, f.S - first);
  store_rows<T>(memory.v(), warp() * 16, dk, f.dk, at, f.D, f.S - first);
}

// Accumulators of a warpgroup's keys.
template <int C>
struct KeyAccumulators {
  float dk[C / 8][4] = {}, dv[C / 8][4] = {};
  // The keys' part of the gradient of a decay in the scores: the same in four lanes, and parts.
  float of_dx[1][4] = {}, decay[2] = {};
};

// A warpgroup's keys over the tiles of queries, with a separate dq warpgroup: dk and dv of a tile
// overlap with the scores of the next.
template <class W, class T, int C, class Weight>
__device__ __forceinline__ void backward_with_dq_warpgroup(
    const Fused& f, const Weight& w, const BackwardMemory<C>& given, const QueryTiles& tiles,
    const KeyDecay<kHasDecay<W>>& decay, const GatesOf<W>& gates, KeyAccumulators<C>& sums) {
  constexpr int kStages = HopperBackwardShape<C>::kStages;
  const int warpgroup = warpgroup_index(), key = tiles.s0 + warp() * 16 + lane() / 4;
  QueryTile now(tiles);
  float x[8][4], dp[8][4];
  uint32_t weights[4][4], slopes[4][4], keys[C / 16][4];
  if constexpr (kKeysInRegs<Weight>) load_a_operand(keys, given.k());
  int i = 0;
#pragma unroll 1
  do {
    const int stage = i % kStages;
    const BackwardMemory<C> memory = given.in_round(i);
    const QueryColumns& of = memory.of(stage);
    mbarrier_wait(memory.full(stage), i / kStages & 1);
    wgmma_fence();
    if constexpr (kKeysInRegs<Weight>) {
      register_fence(keys);
      wgmma_abt_rs<T>(x, keys, memory.q(stage));
    } else {
      wgmma_abt<T>(x, memory.k(), 64 * warpgroup, memory.q(stage));
    }
    wgmma_abt<T>(dp, memory.v(), 64 * warpgroup, memory.g(stage));
    const uint32_t flags = of.flags[warpgroup];
    wgmma_wait<1>();
    register_fence(x), register_fence(weights), register_fence(slopes);
    if (i > 0) mbarrier_arrive(memory.free((i - 1) % kStages));
    if constexpr (kHasCap<W>) cap<T, kCapPolynomialBackward>(w, x);
    if constexpr (kHasCentre<W>) subtract_centres(of, x);
    const MaskBits bits = mask<W>(f, of, memory.seen8(stage), flags, tiles.b, key, x);
    to_weights<T, 2>(f, w, of, flags, bits, decay, x, weights);
    wgmma_fence();
    wgmma_ab_rs<T>(sums.dv, weights, memory.g(stage));
    wgmma_commit();
    wgmma_wait<1>();
    register_fence(dp);
    if (!std::is_same_v<Weight, Linear> && f.gate)
      gates.multiply(f, Head(tiles.b, 0, tiles.g), key, dp);
    if constexpr (kHasDecay<W> && !kIsExp<W>)
      if (f.d_decay_key)
        add_decay_rows<T, std::is_same_v<Weight, Linear>>(f, Head(tiles.b, now.h, tiles.g), now.t0,
                                                          weights, dp, gates.of);
    hopper_score_gradients<T, W>(f, Head(tiles.b, now.h, tiles.g), now.t0, of, bits, x, dp, slopes,
                                 sums.decay);
    wgmma_fence();
    wgmma_ab_rs<T>(sums.dk, slopes, memory.q(stage));
    if (kDecayInScores<W> && f.d_decay_key) wgmma_sums_rs<T>(sums.of_dx, slopes, memory.ones());
    wgmma_commit();
    if (f.dq_sum) {
      mbarrier_wait(memory.dx_free(i % 2), (i / 2 & 1) ^ 1);
      store_dx(memory.dx(i % 2), slopes);
      mbarrier_arrive_warp(memory.dx_full(i % 2));
    }
    now.advance(tiles), ++i;
  } while (now.inside(tiles));
  wgmma_wait<0>();
  register_fence(sums.dk), register_fence(sums.dv), register_fence(weights), register_fence(slopes);
  if constexpr (kSumsDx<W>) register_fence(sums.of_dx);
}

// The same where each warpgroup computes half of dq's channels.
template <class W, class T, int C, class Weight>
__device__ __forceinline__ void backward_with_shared_dq(
    const Fused& f, const Weight& w, const BackwardMemory<C>& given, const QueryTiles& tiles,
    const KeyDecay<kHasDecay<W>>& decay, const GatesOf<W>& gates, KeyAccumulators<C>& sums) {
  using Shape = HopperBackwardShape<C>;
  constexpr int kStages = Shape::kStages;
  const int warpgroup = warpgroup_index(), key = tiles.s0 + warp() * 16 + lane() / 4;
  QueryTile now(tiles);
  int i = 0;
#pragma unroll 1
  do {
    const int stage = i % kStages;
    const BackwardMemory<C> memory = given.in_round(i);
    const QueryColumns& of = memory.of(stage);
    float x[8][4], dp[8][4];
    uint32_t weights[4][4], slopes[4][4];
    mbarrier_wait(memory.full(stage), i / kStages & 1);
    wgmma_fence();
    wgmma_abt<T>(x, memory.k(), 64 * warpgroup, memory.q(stage));
    wgmma_abt<T>(dp, memory.v(), 64 * warpgroup, memory.g(stage));
    const uint32_t flags = of.flags[warpgroup];
    wgmma_wait<1>();
    register_fence(x);
    if constexpr (kHasCap<W>) cap<T, kCapPolynomialBackward>(w, x);
    if constexpr (kHasCentre<W>) subtract_centres(of, x);
    const MaskBits bits = mask<W>(f, of, memory.seen8(stage), flags, tiles.b, key, x);
    to_weights<T, 1>(f, w, of, flags, bits, decay, x, weights);
    wgmma_fence();
    wgmma_ab_rs<T>(sums.dv, weights, memory.g(stage));
    wgmma_commit();
    wgmma_wait<1>();
    register_fence(dp);
    if (!std::is_same_v<Weight, Linear> && f.gate)
      gates.multiply(f, Head(tiles.b, 0, tiles.g), key, dp);
    if constexpr (kHasDecay<W> && !kIsExp<W>)
      if (f.d_decay_key)
        add_decay_rows<T, std::is_same_v<Weight, Linear>>(f, Head(tiles.b, now.h, tiles.g), now.t0,
                                                          weights, dp, gates.of);
    hopper_score_gradients<T, W>(f, Head(tiles.b, now.h, tiles.g), now.t0, of, bits, x, dp, slopes,
                                 sums.decay);
    wgmma_fence();
    wgmma_ab_rs<T>(sums.dk, slopes, memory.q(stage));
    wgmma_commit();
    store_dx(memory.dx(i % 2), slopes);
    if (threadIdx.x % 128 == 0) tma_reduce_wait<0>();
    named_barrier_sync<128 * Shape::kWarpgroups>(1);
    DqAccumulator<T, C, C / 16> of_queries;
    of_queries.begin(memory, i, warpgroup * (C / 2));
    float of_rows[1][4] = {}, of_keys[1][4] = {};  // sums of dx of the warpgroup's own keys
    if (sums_dx<W>(f)) {
      const auto dx = memory.dx(i % 2);
      begin_sums<T, Major::mn>(
          of_rows, [&](int s) { return dx.mn_major(0, 4 * warpgroup + s); }, memory.ones());
      if constexpr (kDecayInScores<W>)
        begin_sums<T, Major::k>(
            of_keys, [&](int s) { return dx.k_major(64 * warpgroup, s); }, memory.ones());
    }
    wgmma_commit();
    wgmma_wait<0>();
    register_fence(sums.dk), register_fence(sums.dv), register_fence(weights),
        register_fence(slopes), register_fence(of_queries.dq);
    if constexpr (kSumsDx<W>) register_fence(of_rows), register_fence(of_keys);
    mbarrier_arrive(memory.free(stage));
    if (sums_dx<W>(f) && f.dq_sum) add_sums<W>(f, tiles.b, now.h, now.t0, of_rows[0]);
    if (kDecayInScores<W> && f.d_decay_key && lane() % 4 == 0)
      sums.decay[0] += of_keys[0][0], sums.decay[1] += of_keys[0][2];
    if (f.dq_sum) of_queries.add(f, memory, tiles.b, now, warpgroup, 2 + warpgroup, warpgroup);
    now.advance(tiles), ++i;
  } while (now.inside(tiles));
  if (threadIdx.x % 128 == 0) tma_reduce_wait<0>();
}

template <class T, class W, int C, class Weight>
__device__ __forceinline__ void backward_keys(const Fused& f, const Weight& w,
                                              const BackwardMemory<C>& memory,
                                              const QueryTiles& tiles) {
  KeyAccumulators<C> sums;
  const GatesOf<W> gates(f, Head(tiles.b, 0, tiles.g), tiles.s0 + warp() * 16 + lane() / 4);
  KeyDecay<kHasDecay<W>> decay(f, Head(tiles.b, 0, tiles.g), tiles.s0,
                               tiles.s0 + warp() * 16 + lane() / 4);
  if constexpr (kHasDecay<W>) decay.set(w, gates.of, f.scale);
  mbarrier_wait(memory.keys_full(), 0);
  if (QueryTile(tiles).inside(tiles)) {
    if constexpr (HopperBackwardShape<C>::kDqWarpgroup) {
      backward_with_dq_warpgroup<W, T>(f, w, memory, tiles, decay, gates, sums);
    } else {
      backward_with_shared_dq<W, T>(f, w, memory, tiles, decay, gates, sums);
    }
  }
  if constexpr (kDecayInScores<W>)
    if (f.d_decay_key)
      store_decay(f, Head(tiles.b, 0, tiles.g), tiles.s0 + warp() * 16 + lane() / 4, sums.of_dx,
                  sums.decay);
  constexpr bool kOfValues = kHasDecay<W> && !kIsExp<W>;
  if (f.gate || (kOfValues && f.d_decay_key)) {
    const Head head(tiles.b, 0, tiles.g);
    store_gates<T, kOfValues>(f, memory, head, tiles.s0, sums.dv);
    if (!kOfValues || f.gate) gates.multiply(f, head, tiles.s0 + warp() * 16 + lane() / 4, sums.dv);
  }
  float scale = f.scale;
  if constexpr (kHasCap<W>) scale *= w.in;
  store_keys<T>(f, scale, memory, tiles, sums.dk, sums.dv);
}

template <class T, int C, class W, class Shape = HopperBackwardShape<C>>
__global__ __launch_bounds__(Shape::kThreads, 1) void hopper_backward_kernel(
    const __grid_constant__ Fused f, const __grid_constant__ W w,
    const __grid_constant__ BackwardMaps maps) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const BackwardMemory<C> memory{bytes, shared_address(bytes)};
  // Registers moved from the other two warpgroups, for keys that some polynomials hold.
  constexpr int kMore = Shape::kDqWarpgroup && !kIsExp<W> ? 8 : 0;
  QueryTiles tiles(f, Shape());
  if constexpr (kHasDecay<W>) tiles.end_with_decay(f, Shape::kKeys);
  const bool log_space = needs_log_space<W>(f, Head(tiles.b, 0, tiles.g), tiles.s0);
  if (threadIdx.x == 0) memory.init_barriers();
  if constexpr (kSumsDx<W>) memory.template make_ones<T>();
  __syncthreads();
  const int warpgroup = warpgroup_index();
  if (warpgroup == Shape::kWarpgroups + Shape::kDqWarpgroup) {
    decrease_registers<Shape::kProducerRegisters - kMore>();
    if (warp() % 4 == 0) produce_queries<W>(f, maps, memory, tiles, log_space);
  } else if (warpgroup < Shape::kWarpgroups) {
    increase_registers<Shape::kConsumerRegisters + kMore>();
    const auto sum = [&](const auto& weight) __attribute__((always_inline)) {
      backward_keys<T, W>(f, weight, memory, tiles);
    };
    if constexpr (kHasDecay<W> && !kIsExp<W>)
      if (log_space) {
        const bool scaled = slope_degree_of(w) != 0;  // its coefficients include the scale
        const float scale = scaled ? 1 : f.scale, per_scale = scaled ? 1 / f.scale : 1;
        if (w.of.degree == 1) return sum(LogSpace<true>{w.of, scale, per_scale});
        return sum(LogSpace<false>{w.of, scale, per_scale});
      }
    with_slopes(w, sum);
  } else if constexpr (Shape::kDqWarpgroup) {
    decrease_registers<Shape::kDqRegisters - kMore>();
    if constexpr (kSumsDx<W>)
      if (sums_dx<W>(f)) return dq_warpgroup<T, W, true>(f, memory, tiles);
    dq_warpgroup<T, W, false>(f, memory, tiles);
  }
}

}  // namespace horner::attn::kernels::cuda

// Backward on Hopper: a block of threads has 128 keys of one key head, 64 for each of two groups of
// four warps, and one warp more that begins the copies of the tiles of queries that see them.
// Scores are taken transposed, as in fused_cuda_backward.cuh: w and dx stay in registers as left
// factors, and dx goes to shared memory too, for dq = dx k. With 64 channels a third group takes
// dq, so that none waits for another; with 128 there are no registers for one: each takes half of
// its channels.
#pragma once

#include "attn/kernels/cuda/hopper/score_gradient.cuh"

namespace horner::attn::kernels::cuda {

// Keys by queries, over the channels: begun.
template <class T, int C, int R, int S, int columns>
__device__ inline void begin_rows_by_rows(float (&x)[columns][4], Panel<R, C> a, int row,
                                          Panel<S, C> b) {
  begin_product<T, false, Over::channels, Over::channels>(x, a.by_channels(row, 0),
                                                          b.by_channels(0, 0));
#pragma unroll
  for (int i = 1; i < C / 16; ++i)
    begin_product<T, true, Over::channels, Over::channels>(x, a.by_channels(row, i),
                                                           b.by_channels(0, i));
  end_of_batch();
}

// With 64 channels, polynomials of low degree hold their keys as left factors in registers:
// products then read half as much of shared memory. Higher ones and exp are no faster that way.
template <class Weight>
inline constexpr bool kHoldsKeys = false;
template <int degree>
inline constexpr bool kHoldsKeys<OfDegree<degree>> = degree == 2 || degree == 3 || degree == 4;
template <int degree>
inline constexpr bool kHoldsKeys<UpToDegree<degree>> = true;
template <>
inline constexpr bool kHoldsKeys<Linear> = true;

// A warp's rows of a panel as left factors.
template <int R, int C>
__device__ __forceinline__ void load_rows(uint32_t (&x)[C / 16][4], Panel<R, C> a) {
  const int row = warp() * 16 + lane() % 16;
#pragma unroll
  for (int j = 0; j < C / 16; ++j) {
    const int c = 2 * j + lane() / 16;
    const uint32_t at = a.at + uint32_t(c / 8 * a.kColumn + row * 128 + ((c % 8 ^ (row & 7)) << 4));
    load_matrices(x[j], at);
  }
}
// Their product with the rows of another, begun.
template <class T, int S, int C>
__device__ inline void begin_by_rows(float (&x)[8][4], const uint32_t (&a)[C / 16][4],
                                     Panel<S, C> b) {
  set_product<T, Over::channels>(x, a[0], b.by_channels(0, 0));
#pragma unroll
  for (int i = 1; i < C / 16; ++i) add_product<T, Over::channels>(x, a[i], b.by_channels(0, i));
  end_of_batch();
}

// dq of a tile and `columns` * 8 channels from `channel` on, begun; then added to memory.
// `summed`: with eight columns more, each the sum of dx.
template <class T, int C, int columns, bool summed = false>
struct QuerySums {
  float dq[columns + summed][4];

  __device__ void begin(BackwardMemory<C> memory, int i, int channel) {
    using Shape = HopperBackwardShape<C>;
    const auto dx = memory.dx(i % 2);
    const auto k = memory.k();
    const auto right = [&](int s) {
      if constexpr (summed) return k.by_rows_and(memory.ones(), s);
      return k.by_rows(channel, s);
    };
    before_products();
    begin_product<T, false, Over::rows, Over::rows>(dq, dx.by_rows(0, 0), right(0));
#pragma unroll
    for (int s = 1; s < Shape::kKeys / 16; ++s)
      begin_product<T, true, Over::rows, Over::rows>(dq, dx.by_rows(0, s), right(s));
  }
  // To [tile][column / 8][thread][4], or the half `part` of it, through place 0 or 1 of shared
  // memory, by the copy engine.
  __device__ void add(const Fused& f, BackwardMemory<C> memory, int b, const QueryTile& at,
                      int place, int barrier, int part = 0) const {
    constexpr int kBytes = columns * 128 * 16;
    const int64_t tiles = (f.T + 63) / 64, tile = int64_t(b * f.H + at.h) * tiles + at.t0 / 64;
    const uint32_t from = memory.sums() + uint32_t(place * kBytes);
#pragma unroll
    for (int j = 0; j < columns; ++j)
      store_float4(from + uint32_t((j * 128 + int(threadIdx.x) % 128) * 16), dq[j]);
    stored_for_products();
    meet<128>(barrier);
    if (threadIdx.x % 128 == 0)
      add_to_memory(f.dq_sum + (tile * (C / 8) + part * columns) * 512, from, kBytes);
  }
};

// The group that takes dq.
template <class T, bool centred, int C>
__device__ __forceinline__ void sum_queries(const Fused& f, const BackwardMemory<C>& given,
                                            const QueryTiles& tiles) {
  QueryTile now(tiles);
  if (!f.dq_sum || !now.inside(tiles)) return;
  QuerySums<T, C, C / 8, centred> sums;
  wait(given.keys_full(), 0);
#pragma unroll 1
  for (int i = 0; now.inside(tiles); now.advance(tiles), ++i) {
    const BackwardMemory<C> memory = given.in_round(i);
    wait(memory.dx_full(i % 2), i / 2 & 1);
    sums.begin(memory, i, 0);
    end_of_batch();
    wait_for_products<0>();
    touch(sums.dq);
    arrive_by_warp(memory.dx_free(i % 2));
    if constexpr (centred) add_centres(f, tiles.b, now.h, now.t0, sums.dq[C / 8]);
    if (threadIdx.x % 128 == 0) added_to_memory<1>();
    meet<128>(2);
    sums.add(f, memory, tiles.b, now, i % 2, 3);
  }
  if (threadIdx.x % 128 == 0) added_to_memory<0>();
}

// C += x y, begun: x a left factor in registers, y rows of queries.
template <class T, int columns, int steps, int R, int C>
__device__ __forceinline__ void begin_sums(float (&c)[columns][4], const uint32_t (&x)[steps][4],
                                           Panel<R, C> y) {
#pragma unroll
  for (int j = 0; j < steps; ++j) add_product<T, Over::rows>(c, x[j], y.by_rows(0, j));
}

// dx of a warp's keys, for the product that takes it to dq.
template <int R, int C, int steps>
__device__ __forceinline__ void store_dx(Panel<R, C> dx, const uint32_t (&x)[steps][4]) {
  const int key = warp() * 16 + lane() % 16;  // whose row this lane gives
#pragma unroll
  for (int j = 0; j < steps; ++j)
    store_matrices(dx.at + uint32_t(key * 128 + (((2 * j + lane() / 16) ^ (key & 7)) << 4)), x[j]);
  stored_for_products();
}

// The gradients of the gates: values times what they gather without a gate. That of the decay, of
// what they gather with it: a key's weights times their gradients.
template <class T, bool decays, int C, int columns>
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
      const uint32_t word = load_word(v.at + uint32_t(j / 8 * v.kColumn + row * 128 +
                                                      ((j % 8 ^ (row & 7)) << 4) + lane() % 4 * 4));
      const T* const y = reinterpret_cast<const T*>(&word);
      sum += dv[j][2 * i] * float(y[0]) + dv[j][2 * i + 1] * float(y[1]);
    }
    sum = quad_sum(sum);
    if (lane() % 4 == 0 && s0 + row < f.S) {
      if (!decays || f.gate) f.d_gate[head.key(f, s0 + row)] = sum;
      if constexpr (decays) {
        const float gate = f.gate ? gate_of_key(f, head, s0 + row) : 1;
        f.d_decay_key[head.key(f, s0 + row)] = pull_of(f, head, s0 + row) - double(sum) * gate;
      }
    }
  }
  __syncwarp();
}

// The sums of a warp's keys, through the group's own values, which no product reads any more.
template <class T, int C, int columns>
__device__ __forceinline__ void store_keys(const Fused& f, const BackwardMemory<C>& memory,
                                           const QueryTiles& tiles, float (&dk)[columns][4],
                                           const float (&dv)[columns][4]) {
#pragma unroll
  for (int j = 0; j < 4 * columns; ++j) dk[j / 4][j % 4] *= f.scale;
  const int first = tiles.s0 + warp() * 16;
  const int64_t at = Head(tiles.b, 0, tiles.g).key(f, first);
  store_rows<T>(memory.v(), warp() * 16, dv, f.dv, at, f.E, f.S - first);
  store_rows<T>(memory.v(), warp() * 16, dk, f.dk, at, f.D, f.S - first);
}

// What a group has gathered of its keys.
template <int C>
struct KeyRows {
  float dk[C / 8][4] = {}, dv[C / 8][4] = {};
};

// A group's keys over the tiles of queries, with a group apart for dq: dk and dv of a tile are
// taken beside the scores of the next.
template <class W, class T, int C, class Weight>
__device__ __forceinline__ void sum_beside_dq(const Fused& f, const Weight& w,
                                              const BackwardMemory<C>& given,
                                              const QueryTiles& tiles,
                                              const KeyFades<kDecays<W>>& fades,
                                              const GatesOf<W>& gates, KeyRows<C>& sums) {
  constexpr int kStages = HopperBackwardShape<C>::kStages;
  const int group = group_of_warp(), key = tiles.s0 + warp() * 16 + lane() / 4;
  QueryTile now(tiles);
  float x[8][4], dp[8][4];
  uint32_t weights[4][4], slopes[4][4], keys[C / 16][4];
  if constexpr (kHoldsKeys<Weight>) load_rows(keys, given.k());
  int i = 0;
#pragma unroll 1
  do {
    const int stage = i % kStages;
    const BackwardMemory<C> memory = given.in_round(i);
    const QueryColumns& of = memory.of(stage);
    wait(memory.full(stage), i / kStages & 1);
    before_products();
    if constexpr (kHoldsKeys<Weight>) {
      touch(keys);
      begin_by_rows<T>(x, keys, memory.q(stage));
    } else {
      begin_rows_by_rows<T>(x, memory.k(), 64 * group, memory.q(stage));
    }
    begin_rows_by_rows<T>(dp, memory.v(), 64 * group, memory.g(stage));
    const uint32_t care = of.care[group];
    wait_for_products<1>();
    touch(x), touch(weights), touch(slopes);
    if (i > 0) arrive(memory.free((i - 1) % kStages));
    if constexpr (kCentred<W>) subtract_centres(of, x);
    const Marks marks = mask<W>(f, of, memory.near(stage), care, tiles.b, key, x);
    weigh<T, 2>(f, w, of, care, marks, fades, x, weights);
    before_products();
    begin_sums<T>(sums.dv, weights, memory.g(stage));
    end_of_batch();
    wait_for_products<1>();
    touch(dp);
    if (!std::is_same_v<Weight, Linear> && f.gate)
      gates.multiply(f, Head(tiles.b, 0, tiles.g), key, dp);
    grade<T, W>(of, marks, x, dp, slopes);
    before_products();
    begin_sums<T>(sums.dk, slopes, memory.q(stage));
    end_of_batch();
    if (f.dq_sum) {
      wait(memory.dx_free(i % 2), (i / 2 & 1) ^ 1);
      store_dx(memory.dx(i % 2), slopes);
      arrive_by_warp(memory.dx_full(i % 2));
    }
    now.advance(tiles), ++i;
  } while (now.inside(tiles));
  wait_for_products<0>();
  touch(sums.dk), touch(sums.dv), touch(weights), touch(slopes);
}

// The same with half of the channels of dq for each group.
template <class W, class T, int C, class Weight>
__device__ __forceinline__ void sum_with_dq(const Fused& f, const Weight& w,
                                            const BackwardMemory<C>& given, const QueryTiles& tiles,
                                            const KeyFades<kDecays<W>>& fades,
                                            const GatesOf<W>& gates, KeyRows<C>& sums) {
  using Shape = HopperBackwardShape<C>;
  constexpr int kStages = Shape::kStages;
  const int group = group_of_warp(), key = tiles.s0 + warp() * 16 + lane() / 4;
  QueryTile now(tiles);
  int i = 0;
#pragma unroll 1
  do {
    const int stage = i % kStages;
    const BackwardMemory<C> memory = given.in_round(i);
    const QueryColumns& of = memory.of(stage);
    float x[8][4], dp[8][4];
    uint32_t weights[4][4], slopes[4][4];
    wait(memory.full(stage), i / kStages & 1);
    before_products();
    begin_rows_by_rows<T>(x, memory.k(), 64 * group, memory.q(stage));
    begin_rows_by_rows<T>(dp, memory.v(), 64 * group, memory.g(stage));
    const uint32_t care = of.care[group];
    wait_for_products<1>();
    touch(x);
    if constexpr (kCentred<W>) subtract_centres(of, x);
    const Marks marks = mask<W>(f, of, memory.near(stage), care, tiles.b, key, x);
    weigh<T, 1>(f, w, of, care, marks, fades, x, weights);
    before_products();
    begin_sums<T>(sums.dv, weights, memory.g(stage));
    end_of_batch();
    wait_for_products<1>();
    touch(dp);
    if (!std::is_same_v<Weight, Linear> && f.gate)
      gates.multiply(f, Head(tiles.b, 0, tiles.g), key, dp);
    grade<T, W>(of, marks, x, dp, slopes);
    before_products();
    begin_sums<T>(sums.dk, slopes, memory.q(stage));
    end_of_batch();
    store_dx(memory.dx(i % 2), slopes);
    if (threadIdx.x % 128 == 0) added_to_memory<0>();
    meet<128 * Shape::kGroups>(1);
    QuerySums<T, C, C / 16> of_queries;
    of_queries.begin(memory, i, group * (C / 2));
    float centres[1][4];
    if constexpr (kCentred<W>)  // of the group's own keys
      begin_centres<T, 4>(centres, memory.dx(i % 2), 4 * group, ones_at(memory.ones()));
    end_of_batch();
    wait_for_products<0>();
    touch(sums.dk), touch(sums.dv), touch(weights), touch(slopes), touch(of_queries.dq);
    if constexpr (kCentred<W>) touch(centres);
    arrive(memory.free(stage));
    if constexpr (kCentred<W>)
      if (f.dq_sum) add_centres(f, tiles.b, now.h, now.t0, centres[0]);
    if (f.dq_sum) of_queries.add(f, memory, tiles.b, now, group, 2 + group, group);
    now.advance(tiles), ++i;
  } while (now.inside(tiles));
  if (threadIdx.x % 128 == 0) added_to_memory<0>();
}

template <class T, class W, int C, class Weight>
__device__ __forceinline__ void sum_over_queries(const Fused& f, const Weight& w,
                                                 const BackwardMemory<C>& memory,
                                                 const QueryTiles& tiles) {
  KeyRows<C> sums;
  const GatesOf<W> gates(f, Head(tiles.b, 0, tiles.g), tiles.s0 + warp() * 16 + lane() / 4);
  KeyFades<kDecays<W>> fades(f, Head(tiles.b, 0, tiles.g), tiles.s0,
                             tiles.s0 + warp() * 16 + lane() / 4);
  if constexpr (kDecays<W>) fades.set(w, gates.of, f.scale);
  wait(memory.keys_full(), 0);
  if (QueryTile(tiles).inside(tiles)) {
    if constexpr (HopperBackwardShape<C>::kDqGroup) {
      sum_beside_dq<W, T>(f, w, memory, tiles, fades, gates, sums);
    } else {
      sum_with_dq<W, T>(f, w, memory, tiles, fades, gates, sums);
    }
  }
  if (kDecays<W> || f.gate) {
    const Head head(tiles.b, 0, tiles.g);
    store_gates<T, kDecays<W>>(f, memory, head, tiles.s0, sums.dv);
    if (!kDecays<W> || f.gate)
      gates.multiply(f, head, tiles.s0 + warp() * 16 + lane() / 4, sums.dv);
  }
  store_keys<T>(f, memory, tiles, sums.dk, sums.dv);
}

template <class T, int C, class W>
__global__ __launch_bounds__(HopperBackwardShape<C>::kThreads,
                             1) void hopper_keys_kernel(const __grid_constant__ Fused f,
                                                        const __grid_constant__ W w,
                                                        const __grid_constant__ BackwardMaps maps) {
  using Shape = HopperBackwardShape<C>;
  extern __shared__ __align__(1024) unsigned char bytes[];
  const BackwardMemory<C> memory{bytes, shared_address(bytes)};
  // Registers of the other two groups that the keys held by some polynomials take.
  constexpr int kMore = Shape::kDqGroup && !kIsExp<W> ? 8 : 0;
  const QueryTiles tiles(f, Shape());
  const bool steep = is_steep<W>(f, Head(tiles.b, 0, tiles.g), tiles.s0);
  if (threadIdx.x == 0) memory.make_barriers();
  if constexpr (kCentred<W>) memory.template make_ones<T>();
  __syncthreads();
  const int group = group_of_warp();
  if (group == Shape::kGroups + Shape::kDqGroup) {
    give_registers<Shape::kFewRegisters - kMore>();
    if (warp() % 4 == 0) copy_queries<W>(f, maps, memory, tiles, steep);
  } else if (group < Shape::kGroups) {
    take_registers<Shape::kRegisters + kMore>();
    const auto sum = [&](const auto& weight) __attribute__((always_inline)) {
      sum_over_queries<T, W>(f, weight, memory, tiles);
    };
    if constexpr (kDecays<W> && !kIsExp<W>)
      if (steep) {
        const bool scaled = slope_degree_of(w) != 0;  // its coefficients
        const float scale = scaled ? 1 : f.scale, per_scale = scaled ? 1 / f.scale : 1;
        if (w.of.degree == 1) return sum(Steep<true>{w.of, scale, per_scale});
        return sum(Steep<false>{w.of, scale, per_scale});
      }
    with_slopes(w, sum);
  } else if constexpr (Shape::kDqGroup) {
    give_registers<Shape::kDqRegisters - kMore>();
    sum_queries<T, kCentred<W>>(f, memory, tiles);
  }
}

}  // namespace horner::attn::kernels::cuda

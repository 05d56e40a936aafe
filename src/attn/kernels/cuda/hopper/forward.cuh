// Forward on Hopper: each warpgroup of a thread block owns 64 queries of one head; a producer warp,
// or one consumer thread, issues the TMA loads of keys and values. While a warpgroup turns the
// scores of a tile into weights, its product with the previous values runs.
#pragma once

#include "attn/kernels/cuda/common/row_sums.cuh"
#include "attn/kernels/cuda/hopper/centre.cuh"
#include "attn/kernels/cuda/hopper/decay.cuh"
#include "attn/kernels/cuda/hopper/wgmma.cuh"

namespace horner::attn::kernels::cuda {

inline constexpr int kNumSMs = 132;  // H100 and H200

template <int C>
struct HopperForwardShape {
  static constexpr bool kDecay = false, kRaw = true;
  // Blocks per SM: two small ones hide each other's prologue and epilogue; 128 channels leave no
  // registers for that.
  static constexpr int kBlocks = C == 64 ? 2 : 1;
  static constexpr bool kHasProducer = kBlocks == 1;  // the consumers take its registers
  static constexpr int kAtoms = 1, kKeys = kBlocks == 2 ? 64 : 128, kStages = kBlocks == 2 ? 4 : 2;
  static constexpr int kWarpgroups = 2, kQueries = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + kHasProducer);
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
  using Queries = SwizzledTile<kQueries, C>;
  using Keys = SwizzledTile<kKeys, C>;
  static constexpr int kBarriers = Queries::kBytes + 2 * kStages * Keys::kBytes;  // offset
  static constexpr int kBytes = kBarriers + (1 + 4 * kStages) * 8;
  // With decay: the keys' factors of each stage, after their barriers.
  static constexpr int kDecayAt = kBarriers + 256;
  static constexpr int kDecayBytes = kKeys / kFactorTile * kFactorRow * 4;
  static constexpr int kBytesWithDecay = kDecayAt + kStages * kDecayBytes;
  static_assert(kBytes + 2 * kStages * 8 <= kDecayAt);
};

// Shared-memory layout.
template <int C>
struct ForwardMemory {
  using Shape = HopperForwardShape<C>;
  uint32_t at;

  // The same, but the compiler sees a value that depends on iteration i: it computes addresses
  // where they are used and does not keep them in registers.
  __device__ ForwardMemory in_round(int i) const { return {at + (uint32_t(i) >> 30)}; }
  __device__ typename Shape::Queries q() const { return {at}; }
  __device__ typename Shape::Keys k(int stage) const {
    return {at + uint32_t(Shape::Queries::kBytes + 2 * stage * Shape::Keys::kBytes)};
  }
  __device__ typename Shape::Keys v(int stage) const { return {k(stage).at + Shape::Keys::kBytes}; }
  __device__ uint32_t decay_factors(int stage) const {
    return at + uint32_t(Shape::kDecayAt + stage * Shape::kDecayBytes);
  }
  __device__ uint32_t barrier(int i) const { return at + uint32_t(Shape::kBarriers + 8 * i); }
  __device__ uint32_t q_full() const { return barrier(0); }
  __device__ uint32_t k_full(int stage) const { return barrier(1 + 4 * stage); }
  __device__ uint32_t v_full(int stage) const { return barrier(2 + 4 * stage); }
  __device__ uint32_t k_free(int stage) const { return barrier(3 + 4 * stage); }
  __device__ uint32_t v_free(int stage) const { return barrier(4 + 4 * stage); }

  __device__ uint32_t decay_full(int stage) const {
    return barrier(1 + 4 * Shape::kStages + 2 * stage);
  }
  __device__ uint32_t decay_free(int stage) const { return decay_full(stage) + 8; }

  template <bool has_decay>
  __device__ void init_barriers() const {
    constexpr int kWarps = 4 * Shape::kWarpgroups;
    mbarrier_init(q_full(), 1);
    for (int i = 0; i < Shape::kStages; ++i) {
      mbarrier_init(k_full(i), 1), mbarrier_init(v_full(i), 1);
      mbarrier_init(k_free(i), kWarps), mbarrier_init(v_free(i), kWarps);
      if (has_decay) mbarrier_init(decay_full(i), 1), mbarrier_init(decay_free(i), kWarps);
    }
    mbarrier_init_fence();
  }
};

// The head and block of a thread block; block 0 is the longest. Blocks of a head are consecutive,
// so that shared data stays in cache; those of the last heads, two waves of the SMs, are ordered by
// length, so that no long one is left for the end.
struct HopperSchedule {
  int head, block;

  __device__ HopperSchedule(int heads, int blocks, int at_once) {
    const int last = min(heads, (2 * at_once + blocks - 1) / blocks);
    const int n = int(blockIdx.x), rest = n - (heads - last) * blocks;
    head = rest < 0 ? n / blocks : heads - last + rest % last;
    block = rest < 0 ? n % blocks : rest / last;
  }
};

struct ForwardMaps {
  CUtensorMap q, k, v;
};

// The keys that a block processes: `tiles` of them from `begin` on. Exp with decay begins with the
// last, whose weights are the largest, so that a row finds its shift in its first tile.
template <class W, int keys>
struct ForwardTiles {
  int begin, tiles;
  __device__ int operator[](int i) const {  // the first key of the i-th
    return begin + (kDecayInScores<W> ? tiles - 1 - i : i) * keys;
  }
};

// Issues the loads of the i-th tile, once its stage is free.
template <int C, class W, int keys>
__device__ inline void load_key_tile(const Fused& f, const W& w, const ForwardMaps& maps,
                                     ForwardMemory<C> memory, const Head& head,
                                     const ForwardTiles<W, keys>& tiles, int i) {
  using Shape = HopperForwardShape<C>;
  const int stage = i % Shape::kStages, s0 = tiles[i];
  const int free = (i / Shape::kStages & 1) ^ 1;  // a stage is initially free
  mbarrier_wait(memory.k_free(stage), free);
  mbarrier_arrive_expect(memory.k_full(stage), Shape::Keys::kBytes);
  tma_load_tile(memory.k(stage), maps.k, s0, head.g, head.b, memory.k_full(stage));
  if constexpr (kHasDecay<W>) {
    mbarrier_wait(memory.decay_free(stage), free);
    mbarrier_arrive_expect(memory.decay_full(stage), Shape::kDecayBytes);
    tma_load_bytes(memory.decay_factors(stage), tile_factors(f, w.factors, head, s0),
                   Shape::kDecayBytes, memory.decay_full(stage));
  }
  mbarrier_wait(memory.v_free(stage), free);
  mbarrier_arrive_expect(memory.v_full(stage), Shape::Keys::kBytes);
  tma_load_tile(memory.v(stage), maps.v, s0, head.g, head.b, memory.v_full(stage));
}
template <int C>
__device__ inline void load_queries(const ForwardMaps& maps, ForwardMemory<C> memory,
                                    const Head& head, int t0) {
  mbarrier_arrive_expect(memory.q_full(), HopperForwardShape<C>::Queries::kBytes);
  tma_load_tile(memory.q(), maps.q, t0, head.h, head.b, memory.q_full());
}

// Issues x = q k^T of a warpgroup's queries and a tile of keys.
template <class T, int C, int columns>
__device__ inline void begin_qk(float (&x)[columns][4], ForwardMemory<C> memory, int warpgroup,
                                int stage) {
  const auto q = memory.q();
  const auto k = memory.k(stage);
  wgmma_fence();
  wgmma_ss<T, false, Major::k, Major::k>(x, q.k_major(64 * warpgroup, 0), k.k_major(0, 0));
#pragma unroll
  for (int i = 1; i < C / 16; ++i)
    wgmma_ss<T, true, Major::k, Major::k>(x, q.k_major(64 * warpgroup, i), k.k_major(0, i));
  wgmma_commit();
}

// Issues N += w v, with the weights as A operand in registers.
template <class T, int C, int columns, int steps>
__device__ inline void begin_pv(float (&N)[columns][4], const uint32_t (&w)[steps][4],
                                ForwardMemory<C> memory, int stage) {
  const auto v = memory.v(stage);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < steps; ++i) wgmma_rs<T, Major::mn>(N, w[i], v.mn_major(0, i));
  wgmma_commit();
}

// Rounds an accumulator to the A operands of the next product, in 16 bits.
template <class T, int columns>
__device__ inline void rounded(uint32_t (&y)[columns / 2][4], const float (&x)[columns][4]) {
#pragma unroll
  for (int i = 0; i < columns / 2; ++i) {
    y[i][0] = pack2(T(), x[2 * i][0], x[2 * i][1]), y[i][1] = pack2(T(), x[2 * i][2], x[2 * i][3]);
    y[i][2] = pack2(T(), x[2 * i + 1][0], x[2 * i + 1][1]);
    y[i][3] = pack2(T(), x[2 * i + 1][2], x[2 * i + 1][3]);
  }
}

// Multiplies weights by the gates of their keys, from s0 on.
template <int columns>
__device__ __forceinline__ void gate(const Fused& f, const Head& head, int s0,
                                     float (&x)[columns][4]) {
  const int first = s0 + lane() % 4 * 2;
  const float* const gates = f.gate + head.key(f, first);  // one base address
#pragma unroll
  for (int j = 0; j < columns; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float y = 8 * j + i < f.S - first ? gates[8 * j + i] : 0;
      x[j][i] *= y, x[j][i + 2] *= y;
    }
}

// From products to weights with decay and gates, in place.
template <class Sums, class Weight, class Decay>
__device__ __forceinline__ void decayed_weights(Sums& sums, const Weight& weight,
                                                typename Sums::Products& x, int first,
                                                const Decay& decay) {
  const Fused& f = sums.f;
  if constexpr (kExponential<Weight>) {
    const float scale = f.scale * kLog2e;
    if (decay.log_space) {
      const float per_scale = __frcp_rn(scale);
      decay.each(x[0], [&](float& y, float exponent) { y += exponent * per_scale; });
    }
#pragma unroll
    for (int j = 0; j < 4 * Sums::kTiles; ++j)
      x[0][j / 4][j % 4] = exp2_fast(x[0][j / 4][j % 4] * scale);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      Sums::set_row(x, i, sums.template value<Path::plain>(weight, Sums::of_row(x, i), i, first));
    if (decay.log_space)
      decay.each(x[0], [](float& y, float exponent) { y *= exp2_fast(exponent); });
  }
  decay.multiply(x[0]);
}

// The same for exp, where the decay is part of the scores; adds the weights to the sum.
template <class Sums>
__device__ __forceinline__ void decayed_exp(Sums& sums, typename Sums::Products& x,
                                            const TileLogDecay& decay) {
  decay.add(x[0], sums.f.scale * kLog2e);
  sums.raise_shift([&](int i) {
    const auto y = Sums::of_row(x, i);
    const float top = Sums::reduce4(y, [](float a, float b) { return fmaxf(a, b); });
    return (top + decay.row[i]) * (1 / kLog2e);
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sub = Sums::finite(sums.shift[0][i]) * kLog2e - decay.row[i];
    const auto y = Sums::of_row(x, i);
    Sums::set_row(x, i, vec<2 * Sums::kTiles>([&](int j) { return exp2_fast(y[j] - sub); }));
    sums.add(Sums::of_row(x, i), i);
  }
}

// From products to weights, in place, and added to the sum. Tiles that need a mask or a clamp apply
// it in place: otherwise all tiles run the same code. `bounded`: every row has scores, and none
// needs another shift than 0.
template <class Sums, class Weight, class Decay>
__device__ __forceinline__ void tile_weights(Sums& sums, const Weight& weight,
                                             typename Sums::Products& x, int s0, bool masked,
                                             bool bounded, const Decay& decay) {
  constexpr int n = 2 * Sums::kTiles;
  const Fused& f = sums.f;
  const int first = s0 + lane() % 4 * 2;
  const auto hide = [&](int i, float other) __attribute__((always_inline)) {
    const uint32_t seen = seen_keys<n>(f.seen, sums.head.b, sums.query(i), first);
#pragma unroll
    for (int j = 0; j < n; ++j)
      if (!(seen >> j & 1)) x[0][j / 2][i * 2 + j % 2] = other;
  };
  if (Sums::kIsExp && masked) hide(0, -INFINITY), hide(1, -INFINITY);
  if (f.clamp < INFINITY) {
    const float most = f.clamp / f.scale;
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) x[0][j / 4][j % 4] = min_nan(x[0][j / 4][j % 4], most);
  }
  if constexpr (Decay::kInScores) return decayed_exp(sums, x, decay);
  if constexpr (Sums::kIsExp) {
    if (bounded)
      sums.raise_to_zero();
    else
      sums.raise_shift([&](int i) {
        const auto y = Sums::of_row(x, i);
        return Sums::reduce4(y, [](float a, float b) { return fmaxf(a, b); }) * f.scale;
      });
  }
  if constexpr (Decay::kEnabled && !Decay::kInScores)
    decayed_weights(sums, weight, x, first, decay);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (!Decay::kEnabled)
      Sums::set_row(x, i, sums.template value<Path::plain>(weight, Sums::of_row(x, i), i, first));
    if (!Sums::kIsExp && masked) hide(i, 0);
    if constexpr (!Decay::kEnabled && !Sums::kScaled) sums.add(Sums::of_row(x, i), i);
  }
  if constexpr (Sums::kScaled) sums.rescale_by_max(x);
}

__device__ inline void mbarrier_arrive_warp(uint32_t barrier) {
  __syncwarp();
  if (lane() == 0) mbarrier_arrive(barrier);
}

// Processes a warpgroup's queries from t0 on over the tiles it sees: the first `own` of the
// block's.
template <class T, int C, class W, class Weight, int keys>
__device__ __forceinline__ void sum_key_tiles(const Fused& f, const W& w, const Weight& weight,
                                              const ForwardMemory<C>& given,
                                              const ForwardMaps& maps, const Head& head, int t0,
                                              const ForwardTiles<W, keys>& tiles, int own) {
  using Shape = HopperForwardShape<C>;
  constexpr int kStages = Shape::kStages, kKeys = Shape::kKeys;
  const int warpgroup = warpgroup_index();
  const int first_row = t0 + warp() % 4 * 16 + lane() / 4;
  RunningSums<T, C, BaseWeight<W>, Shape> sums(f, base_weight(w), head, first_row);
  const RowDecay<T, kKeys, kDecayKind<W>> rows(f, head, t0, first_row);
  constexpr bool kHasFactors = kDecayKind<W> == DecayKind::factors;
  const int log_space_at = rows.log_space_from(f, head, t0, tiles.begin, own);
  // Its tiles, in the order of processing.
  const int first = kDecayInScores<W> ? tiles.tiles - own : 0, end = first + own;
  const RowCentres<kHasCentre<W>> centres(f, sums.centre[0]);
  float x[1][kKeys / 8][4];
  uint32_t weights[kKeys / 16][4];
  const auto phase = [](int i) { return i / kStages & 1; };
  // Keys that every query of the warpgroup sees.
  const int first_seen = f.seen.lo(min(t0 + 64, f.T) - 1);
  const int last_seen = f.seen.keep ? 0 : f.seen.hi(min(t0, f.T - 1));
  const auto decay_sums = [&]() __attribute__((always_inline)) {
    if constexpr (kHasFactors)
#pragma unroll
      for (int j = 0; j < C / 2; ++j) sums.N[0][j / 4][j % 4] *= exp2_fast(rows.row[j % 4 / 2]);
  };
  const auto to_weights = [&](int i, const auto& factors) __attribute__((always_inline)) {
    const int s0 = tiles[i];
    if constexpr (kHasFactors && decltype(sums)::kScaled)
      if (i == log_space_at)
        sums.shift[0][0] += rows.row[0] / kLog2e, sums.shift[0][1] += rows.row[1] / kLog2e;
    sums.t0 = first_row + int(uint32_t(i) >> 30);  // varies with i, as in_round
    centres.subtract(x[0]);
    const bool masked = s0 < first_seen || s0 + kKeys > last_seen;
    bool bounded = false;
    if constexpr (kHasCap<W>)
      bounded = cap<T, kCapPolynomialForward>(w, x[0]) && !masked && kCapIsBounded<T> &&
                sums.f.clamp >= 0;
    tile_weights(
        sums, weight, x, s0, masked, bounded,
        rows.decay(given.in_round(i).decay_factors(i % kStages), factors, i >= log_space_at));
  };
  // Before iteration i, without a producer: the values of tile i - 2 have been used.
  const auto load_next_tile = [&](int i) {
    const int next = i + kStages - 2;
    if (!Shape::kHasProducer && threadIdx.x == 128 * (Shape::kWarpgroups - 1) && i > 0 &&
        next < tiles.tiles)
      load_key_tile(f, w, maps, given, head, tiles, next);
  };
  const auto pass = [&](int from, int to) {  // tiles that only other warpgroups see
    for (int i = from; i < to; ++i) {
      load_next_tile(i);
      mbarrier_wait(given.k_full(i % kStages), phase(i));
      mbarrier_arrive_warp(given.k_free(i % kStages));
      if constexpr (kHasDecay<W>) {
        mbarrier_wait(given.decay_full(i % kStages), phase(i));
        mbarrier_arrive_warp(given.decay_free(i % kStages));
      }
      mbarrier_wait(given.v_full(i % kStages), phase(i));
      mbarrier_arrive_warp(given.v_free(i % kStages));
    }
  };
  mbarrier_wait(given.q_full(), 0);
  if constexpr (kDecayInScores<W>) pass(0, first);
  if (own > 0) {
    const int stage = first % kStages;
    load_next_tile(first);
    mbarrier_wait(given.k_full(stage), phase(first));
    begin_qk<T>(x[0], given, warpgroup, stage);
    if constexpr (kHasDecay<W>) mbarrier_wait(given.decay_full(stage), phase(first));
    const auto factors = rows.of_tile(given.decay_factors(stage), log_space_at == 0);
    wgmma_wait<0>();
    register_fence(x[0]);
    mbarrier_arrive_warp(given.k_free(stage));
    to_weights(first, factors);
    if constexpr (kHasDecay<W>) mbarrier_arrive_warp(given.decay_free(stage));
    if (!kHasFactors && f.gate) gate(f, head, tiles[first], x[0]);
    rounded<T>(weights, x[0]);
  }
#pragma unroll 1
  for (int i = first + 1; i < end; ++i) {
    const ForwardMemory<C> memory = given.in_round(i);
    const int stage = i % kStages, previous = (i - 1) % kStages;
    load_next_tile(i);
    mbarrier_wait(memory.k_full(stage), phase(i));
    begin_qk<T>(x[0], memory, warpgroup, stage);
    mbarrier_wait(memory.v_full(previous), phase(i - 1));
    begin_pv<T>(sums.N[0], weights, memory, previous);
    if constexpr (kHasDecay<W>) mbarrier_wait(memory.decay_full(stage), phase(i));
    const auto factors = rows.of_tile(memory.decay_factors(stage), i >= log_space_at);
    wgmma_wait<1>();
    register_fence(x[0]);
    mbarrier_arrive_warp(memory.k_free(stage));
    to_weights(i, factors);
    if constexpr (kHasDecay<W>) mbarrier_arrive_warp(memory.decay_free(stage));
    // The compiler does not move wgmma_wait across this branch; without it, the wait below would be
    // hoisted above the weights.
    if (!kHasFactors && f.gate) gate(f, head, tiles[i], x[0]);
    wgmma_wait<0>();
    register_fence(sums.N[0]), register_fence(weights);
    mbarrier_arrive_warp(memory.v_free(previous));
    sums.rescale();
    if (kHasFactors && !decltype(sums)::kScaled && i == log_space_at) decay_sums();
    rounded<T>(weights, x[0]);
  }
  if (own > 0) {
    const int last = (end - 1) % kStages;
    mbarrier_wait(given.v_full(last), phase(end - 1));
    begin_pv<T>(sums.N[0], weights, given, last);
    wgmma_wait<0>();
    register_fence(sums.N[0]), register_fence(weights);
    mbarrier_arrive_warp(given.v_free(last));
  }
  if constexpr (!kDecayInScores<W>) pass(own, tiles.tiles);
  if (kHasFactors && log_space_at >= own) decay_sums();
  if constexpr (kHasFactors && !decltype(sums)::kScaled)  // only whether there are weights
#pragma unroll
    for (int i = 0; i < 2; ++i)
      sums.sum[0][i] = sees_any(f.seen, head.b, min(first_row + 8 * i, f.T - 1));
  // Through the warpgroup's own queries in shared memory, no longer read by WGMMA.
  const auto store = [&](void* rows, const float(&of)[C / 8][4]) {
    const int first = t0 + warp() % 4 * 16;
    store_rows<T>(given.q(), warp() * 16, of, rows, head.row(f, first), f.E, f.T - first);
  };
  const float r[2] = {sums.normalise(0), sums.normalise(1)};
  if (f.u) store(f.u, sums.N[0]);
  if constexpr (std::is_same_v<T, fp16>)
    if (f.rest) {
      float rest[C / 8][4];
#pragma unroll
      for (int j = 0; j < C / 2; ++j) rest[j / 4][j % 4] = rest_of<T>(sums.N[0][j / 4][j % 4]);
      store(f.rest, rest);
    }
  sums.scale_both(r);
  store(f.o, sums.N[0]);
}

template <class T, int C, class W, class Shape = HopperForwardShape<C>>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void hopper_forward_kernel(
    const __grid_constant__ Fused f, const __grid_constant__ W w,
    const __grid_constant__ ForwardMaps maps) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const ForwardMemory<C> memory{shared_address(bytes)};
  const int blocks = (f.T + Shape::kQueries - 1) / Shape::kQueries;
  const HopperSchedule work(f.B * f.H, blocks, kNumSMs * Shape::kBlocks);
  const Head head(f, work.head);
  const int t0 = (blocks - 1 - work.block) * Shape::kQueries;
  int begin = f.seen.lo(t0) / Shape::kKeys * Shape::kKeys;
  const auto tiles_of = [&](int queries) {
    const int end = f.seen.hi(min(t0 + queries, f.T) - 1);
    return end > begin ? (end - begin + Shape::kKeys - 1) / Shape::kKeys : 0;
  };
  if constexpr (kHasDecay<W>) {
    const int all = tiles_of(Shape::kQueries);
    const auto ends = [&](int i) {
      return is_decayed(f, head, t0, begin + (all - i) * Shape::kKeys - 1);
    };
    begin += (all - tiles_before(all, ends)) * Shape::kKeys;
  }
  if (threadIdx.x == 0) memory.template init_barriers<kHasDecay<W>>();
  __syncthreads();
  const int warpgroup = warpgroup_index();
  const ForwardTiles<W, Shape::kKeys> tiles{begin, tiles_of(Shape::kQueries)};
  const int own = t0 + 64 * warpgroup < f.T ? tiles_of(64 * (warpgroup + 1)) : 0;
  const auto sum = [&]() __attribute__((always_inline)) {
    with_degree(w, degree_of(w), [&](const auto& weight) __attribute__((always_inline)) {
      sum_key_tiles<T>(f, w, weight, memory, maps, head, t0 + 64 * warpgroup, tiles, own);
    });
  };
  if constexpr (!Shape::kHasProducer) {
    if (threadIdx.x == 0) {
      load_queries(maps, memory, head, t0);
      for (int i = 0; i < min(tiles.tiles, Shape::kStages - 1); ++i)
        load_key_tile(f, w, maps, memory, head, tiles, i);
    }
    sum();
  } else if (warpgroup == Shape::kWarpgroups) {
    decrease_registers<Shape::kProducerRegisters>();
    if (threadIdx.x % 128 != 0) return;
    load_queries(maps, memory, head, t0);
    for (int i = 0; i < tiles.tiles; ++i) load_key_tile(f, w, maps, memory, head, tiles, i);
  } else {
    increase_registers<Shape::kConsumerRegisters>();
    sum();
  }
}

}  // namespace horner::attn::kernels::cuda

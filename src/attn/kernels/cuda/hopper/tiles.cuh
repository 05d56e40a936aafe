// Backward on Hopper: shared-memory layout, the tiles of queries that a block processes, and the
// producer warp that loads them.
#pragma once

#include "attn/kernels/cuda/hopper/forward.cuh"

namespace horner::attn::kernels::cuda {

template <int C>
struct HopperBackwardShape {
  static constexpr bool kDqWarpgroup = C == 64;
  static constexpr int kWarpgroups = 2, kKeys = 64 * kWarpgroups, kQueries = 64;
  static constexpr int kStages = C == 64 ? 4 : 3;  // tiles of queries in shared memory
  static constexpr int kThreads = 128 * (kWarpgroups + kDqWarpgroup + 1);
  static constexpr int kConsumerRegisters = kDqWarpgroup ? 200 : 232;
  static constexpr int kDqRegisters = 72, kProducerRegisters = 40;
  using Keys = SwizzledTile<kKeys, C>;
  using Queries = SwizzledTile<kQueries, C>;
  using Dx = SwizzledTile<kKeys, kQueries>;
  static constexpr int kDx = 2 * Keys::kBytes + 2 * kStages * Queries::kBytes;  // offset
  static constexpr int kSums = kDx + 2 * Dx::kBytes, kOf = kSums + 2 * 64 * 64 * 4;
};

// Per-query values of a tile. Exp: a w = 2^(x - first), with the sign of a in `negative`, and dx =
// a w (dp + second). Otherwise dx = w' (first dp + second), and first is a. With decay, whose
// variants have no dW, `first` includes the query's decay: as a factor, or with Exp and in log
// space as 2^-first.
struct QueryColumns {
  float first[64], second[64];
  union {
    short2 seen[64];   // intervals of keys, relative to the block's first
    float centre[64];  // centre / scale; then the intervals are in `seen8`
  };
  uint32_t negative[2];  // one bit per query, Exp or log space: a < 0
  uint32_t flags[2];     // per warpgroup
  static constexpr uint32_t kMasked = 1, kClamped = 2, kNegative = 4;
};

template <int C>
struct BackwardMemory {
  using Shape = HopperBackwardShape<C>;
  unsigned char* bytes;
  uint32_t at;
  static constexpr int kBarriers = Shape::kOf + Shape::kStages * int(sizeof(QueryColumns));
  static constexpr int kBytes = kBarriers + (5 + 2 * Shape::kStages) * 8;
  // With sums of dx: ones, for sums next to dq; with centred scores also intervals of keys in
  // bytes.
  static constexpr int kUnit = C == 64 ? 1024 : 16, kOnes = (kBytes + kUnit - 1) / kUnit * kUnit;
  static constexpr int kSeen8At = kOnes + (C == 64 ? 2048 : 128);
  static constexpr int kBytesWithSums = kSeen8At + Shape::kStages * 128;
  static_assert(kBytesWithSums <= 227 << 10);

  // The same, but the compiler sees a value that depends on iteration i: it computes addresses
  // where they are used and does not keep them in registers.
  __device__ BackwardMemory in_round(int i) const { return {bytes, at + (uint32_t(i) >> 30)}; }
  __device__ typename Shape::Keys k() const { return {at}; }
  __device__ typename Shape::Keys v() const { return {at + Shape::Keys::kBytes}; }
  __device__ typename Shape::Queries q(int stage) const {
    return {at + uint32_t(2 * Shape::Keys::kBytes + 2 * stage * Shape::Queries::kBytes)};
  }
  __device__ typename Shape::Queries g(int stage) const {
    return {q(stage).at + Shape::Queries::kBytes};
  }
  __device__ typename Shape::Dx dx(int i) const {
    return {at + uint32_t(Shape::kDx + i * Shape::Dx::kBytes)};
  }
  __device__ uint32_t sums() const { return at + uint32_t(Shape::kSums); }
  __device__ QueryColumns& of(int stage) const {
    return reinterpret_cast<QueryColumns*>(bytes + Shape::kOf)[stage];
  }
  __device__ uchar2* seen8(int stage) const {
    return reinterpret_cast<uchar2*>(bytes + kSeen8At) + 64 * stage;
  }
  __device__ uint32_t ones() const { return at + uint32_t(kOnes); }
  __device__ uint32_t barrier(int i) const { return at + uint32_t(kBarriers + 8 * i); }
  __device__ uint32_t keys_full() const { return barrier(0); }
  __device__ uint32_t dx_full(int i) const { return barrier(1 + i); }
  __device__ uint32_t dx_free(int i) const { return barrier(3 + i); }
  __device__ uint32_t full(int stage) const { return barrier(5 + 2 * stage); }
  __device__ uint32_t free(int stage) const { return barrier(6 + 2 * stage); }

  // Data stored and loaded by lanes (QueryColumns) is handed over by an arrival of every lane; what
  // TMA writes or WGMMA reads, by one lane per warp.
  __device__ void init_barriers() const {
    constexpr int kWarps = 4 * Shape::kWarpgroups;
    mbarrier_init(keys_full(), 1);
    for (int i = 0; i < 2; ++i) mbarrier_init(dx_full(i), kWarps), mbarrier_init(dx_free(i), 4);
    for (int i = 0; i < Shape::kStages; ++i)
      mbarrier_init(full(i), 33), mbarrier_init(free(i), 32 * kWarps);
    mbarrier_init_fence();
  }
  template <class T>
  __device__ void make_ones() const {
    for (int i = int(threadIdx.x); i < (kSeen8At - kOnes) / 2; i += Shape::kThreads)
      reinterpret_cast<T*>(bytes + kOnes)[i] = T(1.f);
    fence_async_proxy();
  }
};

struct BackwardMaps {
  CUtensorMap q, k, v, g;
};

// The tiles of queries that a block processes: of every query head that reads its key head.
struct QueryTiles {
  int b, g, each, s0, begin, end;

  template <class Shape>
  __device__ QueryTiles(const Fused& f, Shape) : each(f.H / f.G) {
    // Under a causal mask the first keys have the most queries.
    const HopperSchedule work(f.B * f.G, (f.S + Shape::kKeys - 1) / Shape::kKeys, kNumSMs);
    b = work.head / f.G, g = work.head % f.G;
    s0 = work.block * Shape::kKeys;
    begin = f.seen.first_query(s0) / Shape::kQueries * Shape::kQueries;
    end = f.seen.end_query(min(s0 + Shape::kKeys, f.S));
  }
  // Leaves out queries to which no decay is left.
  __device__ void end_with_decay(const Fused& f, int keys) {
    const auto ends = [&](int i) {
      return is_decayed(f, Head(b, 0, g), begin + 64 * i, s0 + keys - 1);
    };
    if (begin < end) end = min(end, begin + 64 * tiles_before((end - begin + 63) / 64, ends));
  }
};
// One such tile.
struct QueryTile {
  int h, t0;

  __device__ explicit QueryTile(const QueryTiles& tiles)
      : h(tiles.g * tiles.each), t0(tiles.begin) {}
  __device__ bool inside(const QueryTiles& tiles) const {
    return tiles.begin < tiles.end && h < (tiles.g + 1) * tiles.each;
  }
  __device__ void advance(const QueryTiles& tiles) {
    t0 += 64;
    if (t0 >= tiles.end) t0 = tiles.begin, ++h;
  }
};

// A lane's two queries, n and n + 32 of a tile.
template <class W>
struct LaneQueries {
  Query of[2];
  QueryDecay<kHasDecay<W>> decay;
  QueryCentres<kHasCentre<W>> centres;

  __device__ LaneQueries(const Fused& f, const Head& head, int t0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = t0 + lane() + 32 * i;
      of[i] = t < f.T ? f.queries[head.row(f, t)] : Query{};
      decay.load(f, head, i, t);
      centres.load(f, head, i, t);
    }
  }
  __device__ void write(const Fused& f, QueryColumns& to, uchar2* to_seen8, const QueryTiles& tiles,
                        int t0, double from, bool log_space) const {
    uint32_t negative = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = lane() + 32 * i;
      const bool real = t0 + n < f.T;
      const Query& x = of[i];
      if (kHasDecay<W> && !kIsExp<W> && !log_space) {
        to.first[n] = x.a * exp2_fast(fminf(decay.row(i, from), kMaxLog2Factor));
      } else if constexpr (kIsExp<W> || kHasDecay<W>) {
        float sub = kHasDecay<W> ? x.sub - decay.row(i, from) : x.sub;
        if constexpr (kHasCentre<W>) sub -= centres.of[i] * kLog2e;
        to.first[n] = x.a == 0 ? INFINITY : sub - log2f(fabsf(x.a));
        // An exact division would call its slow path for dW = 0.
        if (kIsExp<W>) to.second[n] = x.a == 0 ? 0 : __fdividef(x.dW, x.a);
        const uint32_t bits = __ballot_sync(~0u, x.a < 0);
        if (lane() == 0) to.negative[i] = bits;
        negative |= bits;
      } else {
        to.first[n] = x.a, to.second[n] = x.dW;
      }
      const auto in_block = [&](int s) { return short(min(max(s - tiles.s0, 0), 128)); };
      const short2 seen =
          real ? short2{in_block(f.seen.lo(t0 + n)), in_block(f.seen.hi(t0 + n))} : short2{0, 0};
      if constexpr (kHasCentre<W>) {
        to.centre[n] = __fdividef(centres.of[i], f.scale);
        to_seen8[n] = {uint8_t(seen.x), uint8_t(seen.y)};
      } else {
        to.seen[n] = seen;
      }
    }
    if (lane() < 2) {
      const int s0 = tiles.s0 + 64 * lane();
      uint32_t flags = is_partial(f.seen, t0, t0 + 64, s0, s0 + 64) ? QueryColumns::kMasked : 0;
      if (f.clamp < INFINITY) flags |= QueryColumns::kClamped;
      to.flags[lane()] = flags | (negative ? QueryColumns::kNegative : 0);
    }
  }
};

// The producer warp.
template <class W, int C>
__device__ inline void produce_queries(const Fused& f, const BackwardMaps& maps,
                                       BackwardMemory<C> memory, const QueryTiles& tiles,
                                       bool log_space) {
  using Shape = HopperBackwardShape<C>;
  const bool leads = lane() == 0;
  QueryTile tile(tiles);
  if (leads) {
    mbarrier_arrive_expect(memory.keys_full(), 2 * Shape::Keys::kBytes);
    tma_load_tile(memory.k(), maps.k, tiles.s0, tiles.g, tiles.b, memory.keys_full());
    tma_load_tile(memory.v(), maps.v, tiles.s0, tiles.g, tiles.b, memory.keys_full());
  }
  if (!tile.inside(tiles)) return;
  double from = 0;
  if constexpr (kHasDecay<W>) from = gates_at_reference(f, Head(tiles.b, 0, tiles.g), tiles.s0);
  LaneQueries<W> queries(f, Head(tiles.b, tile.h, tiles.g), tile.t0);
  for (int i = 0; tile.inside(tiles); ++i) {
    const int stage = i % Shape::kStages, t0 = tile.t0, h = tile.h;
    const uint32_t full = memory.full(stage);
    mbarrier_wait(memory.free(stage), (i / Shape::kStages & 1) ^ 1);
    if (leads) {
      mbarrier_arrive_expect(full, 2 * Shape::Queries::kBytes);
      tma_load_tile(memory.q(stage), maps.q, t0, h, tiles.b, full);
      tma_load_tile(memory.g(stage), maps.g, t0, h, tiles.b, full);
    }
    queries.write(f, memory.of(stage), memory.seen8(stage), tiles, t0, from, log_space);
    mbarrier_arrive(full);
    tile.advance(tiles);  // prefetch the next tile's values
    if (tile.inside(tiles)) queries = LaneQueries<W>(f, Head(tiles.b, tile.h, tiles.g), tile.t0);
  }
}

}  // namespace horner::attn::kernels::cuda

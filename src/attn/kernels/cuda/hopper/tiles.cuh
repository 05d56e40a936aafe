// Where the backward on Hopper has everything in shared memory, the tiles of queries that a block
// goes over, and the warp that brings them there.
#pragma once

#include "attn/kernels/cuda/hopper/forward.cuh"

namespace horner::attn::kernels::cuda {

template <int C>
struct HopperBackwardShape {
  static constexpr bool kDqGroup = C == 64;
  static constexpr int kGroups = 2, kKeys = 64 * kGroups, kQueries = 64;
  static constexpr int kStages = C == 64 ? 4 : 3;  // of tiles of queries, in shared memory
  static constexpr int kThreads = 128 * (kGroups + kDqGroup + 1);
  static constexpr int kRegisters = kDqGroup ? 200 : 232;
  static constexpr int kDqRegisters = 72, kFewRegisters = 40;
  using Keys = Panel<kKeys, C>;
  using Queries = Panel<kQueries, C>;
  using Dx = Panel<kKeys, kQueries>;
  static constexpr int kDx = 2 * Keys::kBytes + 2 * kStages * Queries::kBytes;  // where it begins
  static constexpr int kSums = kDx + 2 * Dx::kBytes, kOf = kSums + 2 * 64 * 64 * 4;
};

// What a tile of queries needs to be known of: for Exp a w = 2^(x - first), with the sign of a
// apart, and dx = a w (dp + second); otherwise dx = w' (first dp + second), and first is a.
// With decay, whose variants have no dW, first has the query's part of it: times `first`, or with
// Exp and where gates are steep 2^-first.
struct QueryColumns {
  float first[64], second[64];
  union {
    short2 seen[64];   // the intervals of keys, from the first of the block on
    float centre[64];  // over the scale; of centred scores, whose intervals are `near`
  };
  uint32_t negative[2];  // a bit for each, with Exp: whether a is below 0
  uint32_t care[2];      // of each group
  static constexpr uint32_t kMasked = 1, kClamped = 2, kNegative = 4;
};

template <int C>
struct BackwardMemory {
  using Shape = HopperBackwardShape<C>;
  unsigned char* bytes;
  uint32_t at;
  static constexpr int kBarriers = Shape::kOf + Shape::kStages * int(sizeof(QueryColumns));
  static constexpr int kBytes = kBarriers + (5 + 2 * Shape::kStages) * 8;
  // With centred scores: ones, for sums beside dq, and the intervals of keys in bytes.
  static constexpr int kUnit = C == 64 ? 1024 : 16, kOnes = (kBytes + kUnit - 1) / kUnit * kUnit;
  static constexpr int kNear = kOnes + (C == 64 ? 2048 : 128);
  static constexpr int kBytesCentred = kNear + Shape::kStages * 128;
  static_assert(kBytesCentred <= 227 << 10);

  // The same in round i of a loop, as far as the compiler knows another: addresses are then made
  // where they are used, not kept in registers all the while.
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
  __device__ uchar2* near(int stage) const {
    return reinterpret_cast<uchar2*>(bytes + kNear) + 64 * stage;
  }
  __device__ uint32_t ones() const { return at + uint32_t(kOnes); }
  __device__ uint32_t barrier(int i) const { return at + uint32_t(kBarriers + 8 * i); }
  __device__ uint32_t keys_full() const { return barrier(0); }
  __device__ uint32_t dx_full(int i) const { return barrier(1 + i); }
  __device__ uint32_t dx_free(int i) const { return barrier(3 + i); }
  __device__ uint32_t full(int stage) const { return barrier(5 + 2 * stage); }
  __device__ uint32_t free(int stage) const { return barrier(6 + 2 * stage); }

  // What is stored and loaded by lanes (QueryColumns) is handed over by every lane's own arrival;
  // what the copy engine writes and products read, by one lane for its warp.
  __device__ void make_barriers() const {
    constexpr int kWarps = 4 * Shape::kGroups;
    make_barrier(keys_full(), 1);
    for (int i = 0; i < 2; ++i) make_barrier(dx_full(i), kWarps), make_barrier(dx_free(i), 4);
    for (int i = 0; i < Shape::kStages; ++i)
      make_barrier(full(i), 33), make_barrier(free(i), 32 * kWarps);
    barriers_are_made();
  }
  template <class T>
  __device__ void make_ones() const {
    for (int i = int(threadIdx.x); i < (kNear - kOnes) / 2; i += Shape::kThreads)
      reinterpret_cast<T*>(bytes + kOnes)[i] = T(1.f);
    stored_for_products();
  }
};

struct BackwardMaps {
  CUtensorMap q, k, v, g;
};

// The tiles of queries that a block goes over: of every query head that reads its key head.
struct QueryTiles {
  int b, g, each, s0, begin, end;

  template <class Shape>
  __device__ QueryTiles(const Fused& f, Shape) : each(f.H / f.G) {
    // Under a causal mask the first keys have most queries.
    const HopperPlace place(f.B * f.G, (f.S + Shape::kKeys - 1) / Shape::kKeys, kMultiprocessors);
    b = place.head / f.G, g = place.head % f.G;
    s0 = place.block * Shape::kKeys;
    begin = f.seen.first_query(s0) / Shape::kQueries * Shape::kQueries;
    end = f.seen.end_query(min(s0 + Shape::kKeys, f.S));
  }
};
// One of them.
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

// Two queries of a lane, n and n + 32 of a tile.
template <class W>
struct LaneQueries {
  Query of[2];
  QueryFades<kDecays<W>> fades;
  QueryCentres<kCentred<W>> centres;

  __device__ LaneQueries(const Fused& f, const Head& head, int t0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = t0 + lane() + 32 * i;
      of[i] = t < f.T ? f.queries[head.row(f, t)] : Query{};
      fades.load(f, head, i, t);
      centres.load(f, head, i, t);
    }
  }
  __device__ void write(const Fused& f, QueryColumns& to, uchar2* to_near, const QueryTiles& tiles,
                        int t0, double from, bool steep) const {
    uint32_t negative = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = lane() + 32 * i;
      const bool real = t0 + n < f.T;
      const Query& x = of[i];
      if (kDecays<W> && !kIsExp<W> && !steep) {
        to.first[n] = x.a * exp2_fast(fminf(fades.row(i, from), kSteep));
      } else if constexpr (kIsExp<W> || kDecays<W>) {
        float sub = kDecays<W> ? x.sub - fades.row(i, from) : x.sub;
        if constexpr (kCentred<W>) sub -= centres.of[i] * kLog2e;
        to.first[n] = x.a == 0 ? INFINITY : sub - log2f(fabsf(x.a));
        // Without a call for a dW of 0, which an exact division makes.
        if (!kDecays<W>) to.second[n] = x.a == 0 ? 0 : __fdividef(x.dW, x.a);
        const uint32_t bits = __ballot_sync(~0u, x.a < 0);
        if (lane() == 0) to.negative[i] = bits;
        negative |= bits;
      } else {
        to.first[n] = x.a, to.second[n] = x.dW;
      }
      const auto near = [&](int s) { return short(min(max(s - tiles.s0, 0), 128)); };
      const short2 seen =
          real ? short2{near(f.seen.lo(t0 + n)), near(f.seen.hi(t0 + n))} : short2{0, 0};
      if constexpr (kCentred<W>) {
        to.centre[n] = __fdividef(centres.of[i], f.scale);
        to_near[n] = {uint8_t(seen.x), uint8_t(seen.y)};
      } else {
        to.seen[n] = seen;
      }
    }
    if (lane() < 2) {
      const int s0 = tiles.s0 + 64 * lane();
      uint32_t care = is_partial(f.seen, t0, t0 + 64, s0, s0 + 64) ? QueryColumns::kMasked : 0;
      if (f.clamp < INFINITY) care |= QueryColumns::kClamped;
      to.care[lane()] = care | (negative ? QueryColumns::kNegative : 0);
    }
  }
};

// The warp that begins copies.
template <class W, int C>
__device__ inline void copy_queries(const Fused& f, const BackwardMaps& maps,
                                    BackwardMemory<C> memory, const QueryTiles& tiles, bool steep) {
  using Shape = HopperBackwardShape<C>;
  const bool leads = lane() == 0;
  QueryTile tile(tiles);
  if (leads) {
    arrive_and_expect(memory.keys_full(), 2 * Shape::Keys::kBytes);
    copy_panel(memory.k(), maps.k, tiles.s0, tiles.g, tiles.b, memory.keys_full());
    copy_panel(memory.v(), maps.v, tiles.s0, tiles.g, tiles.b, memory.keys_full());
  }
  if (!tile.inside(tiles)) return;
  double from = 0;
  if constexpr (kDecays<W>) from = gates_at_reference(f, Head(tiles.b, 0, tiles.g), tiles.s0);
  LaneQueries<W> queries(f, Head(tiles.b, tile.h, tiles.g), tile.t0);
  for (int i = 0; tile.inside(tiles); ++i) {
    const int stage = i % Shape::kStages, t0 = tile.t0, h = tile.h;
    const uint32_t full = memory.full(stage);
    wait(memory.free(stage), (i / Shape::kStages & 1) ^ 1);
    if (leads) {
      arrive_and_expect(full, 2 * Shape::Queries::kBytes);
      copy_panel(memory.q(stage), maps.q, t0, h, tiles.b, full);
      copy_panel(memory.g(stage), maps.g, t0, h, tiles.b, full);
    }
    queries.write(f, memory.of(stage), memory.near(stage), tiles, t0, from, steep);
    arrive(full);
    tile.advance(tiles);  // the next one's are on their way while this waits
    if (tile.inside(tiles)) queries = LaneQueries<W>(f, Head(tiles.b, tile.h, tiles.g), tile.t0);
  }
}

}  // namespace horner::attn::kernels::cuda

// Backward on Hopper: a block of threads has 128 keys of one key head, 64 for each group of four
// warps, and one warp more that begins the copies of the tiles of queries that see them. Scores are
// taken transposed, as in fused_cuda_backward.cuh: w and dx stay in registers as left factors, and
// dx goes to shared memory too, for dq = dx k, half of the channels by each group. The dq of a tile
// is taken while the next is weighed, and added to memory atomically, in the order of registers.
#pragma once

#include "attn/exec/kernels/fused_cuda_backward.cuh"
#include "attn/exec/kernels/hopper_forward.cuh"

namespace horner::attn::kernels::cuda {

template <int C>
struct HopperBackwardShape {
  static constexpr bool kDecay = false, kCentre = false, kIntervals = true;
  static constexpr int kTilesAtOnce = C == 64 ? 2 : 1;
  static constexpr int kAtoms = 1, kGroups = 2, kKeys = 64 * kGroups;
  static constexpr int kStages = C == 64 ? 4 : 3;  // of tiles of queries, in shared memory
  static constexpr int kQueries = 64, kStep = kQueries, kOwn = C, kParts = 1;
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kRegisters = 240, kFewRegisters = 24;
  static constexpr bool kDqLater = C == 64;  // beside the next tile: there are registers for that
  using Keys = Panel<kKeys, C>;
  using Queries = Panel<kQueries, C>;
  using Dx = Panel<kKeys, kQueries>;
  static constexpr int kDx = 2 * Keys::kBytes + 2 * kStages * Queries::kBytes;  // where it begins
  static constexpr int kOf = kDx + 2 * Dx::kBytes;
  static constexpr int kSeen = kOf + kStages * kQueries * int(sizeof(Query));
  static constexpr int kBarriers = kSeen + kStages * kQueries * int(sizeof(int2));
  static constexpr int kBytes = kBarriers + (1 + 2 * kStages) * 8;
};

template <int C>
struct BackwardMemory {
  using Shape = HopperBackwardShape<C>;
  unsigned char* bytes;
  uint32_t at;

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
  __device__ Query* of(int stage) const {
    return reinterpret_cast<Query*>(bytes + Shape::kOf) + stage * Shape::kQueries;
  }
  __device__ int2* seen(int stage) const {
    return reinterpret_cast<int2*>(bytes + Shape::kSeen) + stage * Shape::kQueries;
  }
  __device__ uint32_t barrier(int i) const { return at + uint32_t(Shape::kBarriers + 8 * i); }
  __device__ uint32_t keys_full() const { return barrier(0); }
  __device__ uint32_t full(int stage) const { return barrier(1 + 2 * stage); }
  __device__ uint32_t free(int stage) const { return barrier(2 + 2 * stage); }

  __device__ void make_barriers() const {
    make_barrier(keys_full(), 1);
    for (int i = 0; i < Shape::kStages; ++i)
      make_barrier(full(i), 2), make_barrier(free(i), 4 * Shape::kGroups);
    barriers_are_made();
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
    // The blocks of a head one after the other, so that its queries and their dq stay in the cache.
    // Under a causal mask the first have most queries.
    const int blocks = (f.S + Shape::kKeys - 1) / Shape::kKeys, head = int(blockIdx.x) / blocks;
    b = head / f.G, g = head % f.G;
    s0 = int(blockIdx.x) % blocks * Shape::kKeys;
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

// The warp that begins copies.
template <int C>
__device__ inline void copy_queries(const Fused& f, const BackwardMaps& maps,
                                    BackwardMemory<C> memory, const QueryTiles& tiles) {
  using Shape = HopperBackwardShape<C>;
  const bool leads = lane() == 0;
  QueryTile tile(tiles);
  if (leads && tile.inside(tiles)) {
    arrive_and_expect(memory.keys_full(), 2 * Shape::Keys::kBytes);
    copy_panel(memory.k(), maps.k, tiles.s0, tiles.g, tiles.b, memory.keys_full());
    copy_panel(memory.v(), maps.v, tiles.s0, tiles.g, tiles.b, memory.keys_full());
  }
  for (int i = 0; tile.inside(tiles); tile.advance(tiles), ++i) {
    const int stage = i % Shape::kStages, t0 = tile.t0;
    const Head head(tiles.b, tile.h, tiles.g);
    const uint32_t full = memory.full(stage);
    wait(memory.free(stage), (i / Shape::kStages & 1) ^ 1);
    if (leads) {
      arrive_and_expect(full, 2 * Shape::Queries::kBytes);
      copy_panel(memory.q(stage), maps.q, t0, head.h, head.b, full);
      copy_panel(memory.g(stage), maps.g, t0, head.h, head.b, full);
    }
    for (int n = lane(); n < Shape::kQueries; n += 32) {
      const bool real = t0 + n < f.T;
      memory.of(stage)[n] = real ? f.queries[head.row(f, t0 + n)] : Query{};
      memory.seen(stage)[n] = real ? int2{f.seen.lo(t0 + n), f.seen.hi(t0 + n)} : int2{0, 0};
    }
    arrive_by_warp(full);
  }
}

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

template <int n>
__device__ inline void clear(float (&x)[n][4]) {
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) x[i / 4][i % 4] = 0;
}

// dq of a tile: [64, C / 2] for each group, begun; then added to memory.
template <class T, int C>
struct QuerySums {
  static constexpr int kColumns = C / 16;
  float dq[kColumns][4];

  __device__ void begin(BackwardMemory<C> memory, int i) {
    using Shape = HopperBackwardShape<C>;
    const auto dx = memory.dx(i % 2);
    const auto k = memory.k();
    const int channel = group_of_warp() * (C / 2);
    before_products();
    begin_product<T, false, Over::rows, Over::rows>(dq, dx.by_rows(0, 0), k.by_rows(channel, 0));
#pragma unroll
    for (int s = 1; s < Shape::kKeys / 16; ++s)
      begin_product<T, true, Over::rows, Over::rows>(dq, dx.by_rows(0, s), k.by_rows(channel, s));
    end_of_batch();
  }
  // [tile][column / 8][thread][4]
  __device__ void add(const Fused& f, const Head& head, int t0) const {
    const int64_t tiles = (f.T + 63) / 64, tile = int64_t(head.b * f.H + head.h) * tiles + t0 / 64;
    const int group = warp() / 4, thread = int(threadIdx.x) % 128;
    float4* const at =
        reinterpret_cast<float4*>(f.dq_sum) + (tile * (C / 8) + group * kColumns) * 128 + thread;
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      atomicAdd(at + j * 128, make_float4(dq[j][0], dq[j][1], dq[j][2], dq[j][3]));
  }
};

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

template <class T, int C, class W>
__device__ __forceinline__ void sum_over_queries(const Fused& f, const W& w,
                                                 const BackwardMemory<C>& given,
                                                 const QueryTiles& tiles) {
  using Shape = HopperBackwardShape<C>;
  using Sums = KeySums<T, C, W, Shape>;
  constexpr int kStages = Shape::kStages, kColumns = Shape::kQueries / 8;
  const int group = group_of_warp();
  QueryTile now(tiles), done = now;  // done: the tile whose dq comes next
  Sums sums(f, w, tiles.s0, 0);
  QuerySums<T, C> of_queries;
  float x[1][kColumns][4], dp[1][kColumns][4];
  uint32_t weights[kColumns / 2][4], slopes[kColumns / 2][4];
  if (now.inside(tiles)) wait(given.keys_full(), 0);
  int i = 0;
#pragma unroll 1
  for (; now.inside(tiles); now.advance(tiles), ++i) {
    const int stage = i % kStages;
    const BackwardMemory<C> memory = given.in_round(i);
    wait(memory.full(stage), i / kStages & 1);
    before_products();
    begin_rows_by_rows<T>(x[0], memory.k(), 64 * group, memory.q(stage));
    begin_rows_by_rows<T>(dp[0], memory.v(), 64 * group, memory.g(stage));
    if constexpr (Shape::kDqLater) {
      meet<128 * Shape::kGroups>(1);    // every dx of the tile before is written
      of_queries.begin(memory, i + 1);  // of the first, there is none: its dq is not used
      wait_for_products<1>();
      touch(weights), touch(slopes);
      if (i > 0) arrive_by_warp(memory.free((i - 1) % kStages));
    } else {
      wait_for_products<0>();
    }
    touch(x[0]), touch(dp[0]);
    const int t0 = now.t0, s0 = tiles.s0 + 64 * group;
    const Head head(tiles.b, now.h, tiles.g);
    const typename Sums::Queries tile{
        head, t0, {0}, {0}, memory.of(stage), nullptr, memory.seen(stage), {0}};
    if (C == 64 && is_hidden(f.seen, t0, t0 + Shape::kQueries, s0, s0 + 64)) {
      clear(x[0]), clear(dp[0]);
    } else {
      sums.grade(care_for(f, t0, t0 + Shape::kQueries, s0, s0 + 64), tile, 0, x, dp);
    }
    rounded<T>(weights, x[0]);
    rounded<T>(slopes, dp[0]);
    before_products();
    begin_sums<T>(sums.dv[0], weights, memory.g(stage));
    begin_sums<T>(sums.dk[0], slopes, memory.q(stage));
    end_of_batch();
    store_dx(memory.dx(i % 2), slopes);
    if constexpr (Shape::kDqLater) {
      wait_for_products<1>();
    } else {
      meet<128 * Shape::kGroups>(1);
      of_queries.begin(memory, i);
      wait_for_products<0>();
      touch(sums.dk[0]), touch(sums.dv[0]), touch(weights), touch(slopes);
      arrive_by_warp(memory.free(stage));
    }
    touch(of_queries.dq);
    if (Shape::kDqLater && i == 0) continue;
    if (f.dq_sum) of_queries.add(f, Head(tiles.b, done.h, tiles.g), done.t0);
    done.advance(tiles);
  }
  if constexpr (Shape::kDqLater) {
    if (i > 0) {
      meet<128 * Shape::kGroups>(1);
      of_queries.begin(given, i - 1);
    }
    wait_for_products<0>();
    touch(sums.dk[0]), touch(sums.dv[0]), touch(weights), touch(slopes), touch(of_queries.dq);
    if (f.dq_sum && i > 0) of_queries.add(f, Head(tiles.b, done.h, tiles.g), done.t0);
  }
  store_keys<T>(f, given, tiles, sums.dk[0], sums.dv[0]);
}

template <class T, int C, class W>
__global__ __launch_bounds__(HopperBackwardShape<C>::kThreads,
                             1) void hopper_keys_kernel(const __grid_constant__ Fused f,
                                                        const __grid_constant__ W w,
                                                        const __grid_constant__ BackwardMaps maps) {
  using Shape = HopperBackwardShape<C>;
  extern __shared__ __align__(1024) unsigned char bytes[];
  const BackwardMemory<C> memory{bytes, shared_address(bytes)};
  const QueryTiles tiles(f, Shape());
  if (threadIdx.x == 0) memory.make_barriers();
  __syncthreads();
  if (group_of_warp() == Shape::kGroups) {
    give_registers<Shape::kFewRegisters>();
    if (warp() % 4 == 0) copy_queries(f, maps, memory, tiles);
  } else {
    take_registers<Shape::kRegisters>();
    sum_over_queries<T>(f, w, memory, tiles);
  }
}

// From the sums of dq, in the order of registers, to rows. A block has 64 rows of one head.
template <class T, int C>
__global__ __launch_bounds__(128) void hopper_dq_kernel(const __grid_constant__ Fused f) {
  constexpr int kRow = C + 8;  // numbers, so that rows begin in different banks
  __shared__ __align__(16) T rows[64 * kRow];
  const int64_t tiles = (f.T + 63) / 64, tile = blockIdx.x;
  const float4* const from = reinterpret_cast<const float4*>(f.dq_sum) + tile * (C / 8) * 128;
  T* const own = rows + (warp() * 16 + lane() / 4) * kRow + lane() % 4 * 2;
#pragma unroll
  for (int j = 0; j < C / 8; ++j) {
    const float4 y = from[j * 128 + threadIdx.x];
    store_pair<T>(own, 8 * j, y.x * f.scale, y.y * f.scale);
    store_pair<T>(own, 8 * kRow + 8 * j, y.z * f.scale, y.w * f.scale);
  }
  __syncthreads();
  const int64_t first = tile / tiles * f.T + tile % tiles * 64;
  const int real = min(64, f.T - int(tile % tiles) * 64), chunks = f.D / 8;
  for (int i = int(threadIdx.x); i < real * chunks; i += 128) {
    const int row = i / chunks, c = i % chunks * 8;
    *reinterpret_cast<uint4*>(static_cast<T*>(f.dq) + (first + row) * f.D + c) =
        *reinterpret_cast<const uint4*>(rows + row * kRow + c);
  }
}

}  // namespace horner::attn::kernels::cuda

// Backward: each thread block owns a block of keys of one key head, each warp some of its rows, and
// loops over the tiles of queries that see them (common/key_gradients.cuh). The score gradients dx
// go to shared memory for dq += dx k, which is added to global memory with atomics.
#pragma once

#include "attn/kernels/cuda/common/key_gradients.cuh"

namespace horner::attn::kernels::cuda {

template <class T, int C, class W>
struct BackwardShape {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kTilesPerStep = 1;  // tiles of 8 queries: more would cost registers
  static constexpr int kAtoms = !kWide && C <= 128 ? 2 : 1;  // 16-key atoms per warp
  static constexpr int kWarps = kWide && C == 256 ? 2 : !kWide && C == 128 ? 8 : 4;
  static constexpr int kBlocks = !kWide && C == 64 ? 2 : 1;    // minimum blocks per SM
  static constexpr int kSharing = !kWide && C == 128 ? 2 : 1;  // warps that share keys
  static constexpr int kThreads = 32 * kWarps, kKeys = 16 * kAtoms * kWarps / kSharing;
  static constexpr int kQueries = kWide ? (C == 256 ? 16 : 32) : C == 256 ? 32 : 64;
  static constexpr int kStep = kQueries < 32 ? 16 : 32;  // queries per step
  // Accumulators of 256 channels do not fit in registers: two thread blocks own half each.
  static constexpr int kOwn = C < 128 ? C : 128, kParts = C / kOwn;
  // dq: [16 kDqAtoms, kDqColumns] per warp
  static constexpr int kDqAtoms = kQueries < 32 ? 1 : 2, kDqRows = kQueries / (16 * kDqAtoms);
  static constexpr int kDqColumns = kOwn / (kWarps / kDqRows);
  static constexpr int kTileBytes = kQueries * C * int(sizeof(T));
  static constexpr int kDxBytes = kKeys * kQueries * int(sizeof(T));
  static constexpr int kWeights = kSharing > 1 ? kDxBytes : 0;  // bytes, next to dx
  static constexpr int kKeyBytes = kKeys * C * int(sizeof(T));
  static constexpr int kBytes = 2 * kKeyBytes + 4 * kTileBytes + kDxBytes + kWeights +
                                2 * kQueries * int(sizeof(Query) + sizeof(double));
};

// Adds four consecutive floats atomically; one vector instruction from sm_90 on.
__device__ inline void atomic_add_4(float* at, float4 x) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(at), x);
#else
  atomicAdd(at, x.x), atomicAdd(at + 1, x.y), atomicAdd(at + 2, x.z), atomicAdd(at + 3, x.w);
#endif
}
// A lane holds two columns of one 8-column fragment and two of the next. A warp shuffle gives even
// lanes four consecutive columns of the first, odd lanes four of the next.
__device__ inline float4 gather_4(const float* first, const float* next) {
  const bool odd = lane() % 2;
  const float x = __shfl_xor_sync(~0u, odd ? first[0] : next[0], 1);
  const float y = __shfl_xor_sync(~0u, odd ? first[1] : next[1], 1);
  return odd ? make_float4(x, y, next[0], next[1]) : make_float4(first[0], first[1], x, y);
}

// Adds scale * dq to rows from t and channels from d; a `whole` tile needs no bounds checks.
template <bool whole, int atoms, int n>
__device__ __forceinline__ void atomic_add_rows(const Fused& f, const Head& head, int t, int d,
                                                const float (&dq)[atoms][n][4]) {
  const int odd = lane() % 2;
#pragma unroll
  for (int i = 0; i < 2 * atoms; ++i) {
    const int at = t + i / 2 * 16 + i % 2 * 8 + lane() / 4;
    float* const row = f.dq_sum + head.row(f, at) * f.D + d + 8 * odd + lane() % 4 / 2 * 4;
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      float4 x = gather_4(dq[i / 2][j] + i % 2 * 2, dq[i / 2][j + 1] + i % 2 * 2);
      x = make_float4(x.x * f.scale, x.y * f.scale, x.z * f.scale, x.w * f.scale);
      if (whole || (at < f.T && d + 8 * (j + odd) < f.D)) atomic_add_4(row + 8 * j, x);
    }
  }
}
// The same in fragment order (dq_in_fragments), without the scale.
template <int atoms, int n>
__device__ __forceinline__ void atomic_add_fragments(const Fused& f, const Head& head, int t, int d,
                                                     const float (&dq)[atoms][n][4]) {
  const int64_t tile =
      int64_t(head.b * f.H + head.h) * ((f.T + kDqTile - 1) / kDqTile) + t / kDqTile;
  float* const to = f.dq_sum + (tile * (f.D / 8) + d / 8) * 512 + (t % kDqTile * 2 + lane()) * 4;
#pragma unroll
  for (int j = 0; j < n; ++j) {
    if (d + 8 * j >= f.D) break;
#pragma unroll
    for (int i = 0; i < atoms; ++i) {
      const float* const x = dq[i][j];
      atomic_add_4(to + j * 512 + i * 128, make_float4(x[0], x[1], x[2], x[3]));
    }
  }
}
// dq += dx k for a tile of queries and channels from `first`, once every warp has written its dx.
template <class Shape, class T, int C, class Queries>
__device__ __forceinline__ void add_dq(const Fused& f, const Queries& tile, Tile<T, C> k,
                                       int first) {
  constexpr int atoms = Shape::kDqAtoms, n = Shape::kDqColumns / 8;
  const int t = warp() % Shape::kDqRows * 16 * atoms;
  const int d = first + warp() / Shape::kDqRows * Shape::kDqColumns;
  float dq[atoms][n][4];
  mma_atb<Shape::kKeys>(dq, tile.dx, t, k, d);
  if constexpr (sizeof(T) == 2 && C <= 128) {
    atomic_add_fragments(f, tile.head, tile.t0 + t, d, dq);
  } else {
    const bool whole = tile.t0 + Shape::kQueries <= f.T && f.D == C;
    whole ? atomic_add_rows<true>(f, tile.head, tile.t0 + t, d, dq)
          : atomic_add_rows<false>(f, tile.head, tile.t0 + t, d, dq);
  }
}

// A block of keys in shared memory, and the double-buffered tiles of queries that see it.
template <class T, int C, class W, bool factored, class Shape>
struct KeyBlock {
  using Sums = KeyGradients<T, C, W, Shape>;
  static constexpr int kKeys = Shape::kKeys, kQueries = Shape::kQueries;

  const Fused& f;
  unsigned char* const memory;
  int b, g, first_head, last_head;  // the query heads that read key head g
  int s0, column, begin, end;       // first key and channel; queries [begin, end)

  __device__ KeyBlock(const Fused& f, unsigned char* memory) : f(f), memory(memory) {
    const BlockSchedule work(int(blockIdx.x) / Shape::kParts, f.B * f.G, (f.S + kKeys - 1) / kKeys);
    const int each = f.H / f.G;
    b = work.head / f.G, g = work.head % f.G;
    first_head = g * each, last_head = opaque(first_head + each - 1);
    column = int(blockIdx.x) % Shape::kParts * Shape::kOwn;
    s0 = work.block * kKeys;  // causal: the blocks with most queries first
    if constexpr (kIsSpecial<Shape>) {
      const VisibleRange visible = queries_that_see(f, b, s0, s0 + kKeys);
      begin = visible.some_begin / kQueries * kQueries, end = visible.some_end;
    } else {
      begin = f.seen.first_query(s0) / kQueries * kQueries;
      end = f.seen.end_query(min(s0 + kKeys, f.S));
    }
  }
  __device__ Tile<T, C> k() const { return {shared_address(memory)}; }
  __device__ Tile<T, C> v() const { return {k().at + Shape::kKeyBytes}; }
  __device__ double* gates() const {
    return reinterpret_cast<double*>(memory + Shape::kBytes) - 2 * kQueries;
  }
  // The tile of queries of head h that starts at t0.
  __device__ typename Sums::Queries queries(int stage, int h, int t0) const {
    const Tile<T, C> q{k().at + 2 * Shape::kKeyBytes + uint32_t(stage * 2 * Shape::kTileBytes)};
    const Tile<T, kQueries> dx{k().at + 2 * Shape::kKeyBytes + 4 * Shape::kTileBytes};
    const auto* const of = reinterpret_cast<const Query*>(gates()) - 2 * kQueries;
    return {Head(b, h, g),
            t0,
            q,
            {q.at + Shape::kTileBytes},
            of + stage * kQueries,
            gates() + stage * kQueries,
            dx,
            {dx.at + Shape::kDxBytes},
            factored && t0 + f.S - f.T >= min(s0 + kKeys, f.S) - 1};
  }
  __device__ void copy_keys() const {
    copy_rows<kKeys, Shape::kThreads>(k(), row_of<T>(f.k, b, g, s0), f.k.row, f.S - s0, f.D);
    copy_rows<kKeys, Shape::kThreads>(v(), row_of<T>(f.v, b, g, s0), f.v.row, f.S - s0, f.E);
  }
  __device__ void copy_queries(int stage, int h, int t0) const {
    const auto to = queries(stage, h, t0);
    const int real = f.T - t0, n = int(threadIdx.x);
    copy_rows<kQueries, Shape::kThreads>(to.q, row_of<T>(f.q, b, h, t0), f.q.row, real, f.D);
    copy_rows<kQueries, Shape::kThreads>(to.g, row_of<T>(f.d_o, b, h, t0), f.d_o.row, real, f.E);
    if (n >= kQueries) return;
    cp_async_16(shared_address(to.of + n), f.queries + to.head.row(f, n < real ? t0 + n : 0),
                n < real);
    if (factored && f.decay)
      cp_async_8(shared_address(to.gates + n),
                 f.decay + to.head.key(f, min(max(t0 + n + f.S - f.T, 0), f.S - 1)));
    if (!kHasDecayFactors<T, W> && f.decay)
      gates()[stage * kQueries + n] = gates_at_query(f, to.head, t0 + n);
  }
  // If `factored`: prepares the query that this thread copied for `decayed_gradients`.
  __device__ __forceinline__ void prepare_queries(int stage, const typename Sums::Queries& tile,
                                                  float per_scale, const Sums& sums) const {
    const int n = int(threadIdx.x);
    if (n >= kQueries) return;
    Query query = tile.of[n];
    query.sub *= per_scale, query.limit *= per_scale;
    if (f.decay) {
      const bool factor = tile.after_keys && !f.decay_in_scores;
      const float log_decay = sums.log2_decay_to(tile.gates[n], tile.head),
                  by = factor ? exp2_fast(log_decay) : 1;
      query.a *= by, query.dW *= by;
      reinterpret_cast<float2*>(gates())[stage * kQueries + n].x = factor ? 0 : log_decay;
    }
    const_cast<Query*>(tile.of)[n] = query;
  }

  template <bool general, class Weight>
  __device__ __forceinline__ void over_queries(const Weight& weight, Sums& sums) const {
    const float per_scale = kIsFixedDegree<Weight> ? 1 / f.scale : 1;
    if (factored) sums.set_key_factors(Head(b, first_head, g));
    if (f.gate) {
      cp_async_wait_all();
      gate_values<kKeys, Shape::kThreads>(f, Head(b, first_head, g), s0, v());
    }
    int stage = 0;
    for (int h = first_head, t0 = begin; begin < end && h <= last_head; stage ^= 1) {
      cp_async_wait_all();
      if (factored) prepare_queries(stage, queries(stage, h, t0), per_scale, sums);
      __syncthreads();  // these queries have arrived; all warps are done with the last ones
      const auto tile = queries(stage, h, t0);
      if ((t0 += kQueries) >= end) t0 = begin, ++h;
      if (h <= last_head) copy_queries(stage ^ 1, h, t0);
      sums.template add<general, factored>(weight, tile, k(), v());
      if (Shape::kSharing > 1 || f.dq_sum) __syncthreads();  // every warp has written its dx
      if constexpr (Shape::kSharing > 1) sums.add_shared(tile);
      if (f.dq_sum) add_dq<Shape>(f, tile, k(), column);
    }
  }
};

template <class T, int C, class W, bool factored = false, class Shape = BackwardShape<T, C, W>>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void fused_backward_kernel(
    const __grid_constant__ Fused f, const __grid_constant__ W w) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Block = KeyBlock<T, C, W, factored, Shape>;
  const Block block(f, memory);
  block.copy_keys();
  if (block.begin < block.end) block.copy_queries(0, block.first_head, block.begin);
  typename Block::Sums sums(f, w, block.s0, block.column);
  const auto general = [&](const auto& weight) __attribute__((always_inline)) {
    block.template over_queries<true>(weight, sums);
  };
  const auto plain = [&](const auto& weight) __attribute__((always_inline)) {
    block.template over_queries<false>(weight, sums);
  };
  if constexpr (kIsSpecial<Shape>) {
    const int s = block.s0 + sums.own;
    sums.visible = queries_that_see(f, block.b, s, s + 16 * Shape::kAtoms);
    with_any_degree(w, general);
  } else if constexpr (factored) {
    with_slopes(w, general);
  } else if (!kHasDecayFactors<T, W> && sums_general_gradients(f)) {
    with_any_degree(w, general);
  } else if constexpr (sizeof(T) == 4) {
    with_any_degree(w, plain);
  } else {
    with_slopes(w, plain);
  }
  cp_async_wait_all();
  if (Shape::kSharing > 1) __syncthreads();
  sums.finish(Head(block.b, block.first_head, block.g), block.gates());
}

}  // namespace horner::attn::kernels::cuda

// Every chunk by itself, from the states around it: a block of threads has a block of queries, or
// of keys; first the scores inside the chunk, then the state.
#pragma once

#include "attn/exec/kernels/chunked_cuda_features.cuh"
#include "attn/exec/kernels/fused_cuda_backward.cuh"
#include "attn/exec/kernels/fused_cuda_forward.cuh"

namespace horner::attn::kernels::cuda {

template <class T, int atoms, int warps, int blocks>
struct ChunkShape {
  static constexpr bool kDecay = false;
  static constexpr int kAtoms = atoms, kWarps = warps, kThreads = 32 * warps, kBlocks = blocks;
  static constexpr int kQueries = 16 * atoms * warps;
  static constexpr int kKeys = sizeof(T) == 4 ? 32 : 64;
  static constexpr int kRow = 64 * int(sizeof(T));
  static constexpr int kForwardBytes = kQueries * kRow + 2 * kStateStage + kColumnBytes<T>;
  static constexpr int kQueriesBytes =
      2 * kQueries * kRow + 2 * kStateStage + kColumnBytes<T> + kQueries * kGradientStride * 4;
  static_assert(4 * kKeys * kRow == 2 * kStateStage);
};

// A block of queries of one head, and the keys of its chunk in tiles through shared memory.
template <class T, class Shape>
struct ChunkQueries {
  const Chunks& p;
  const Fused& f;
  Head head;
  int t0, chunk;
  uint32_t stages;

  __device__ ChunkQueries(const Chunks& p, uint32_t stages)
      : p(p),
        f(p.f),
        head(f, int(blockIdx.x)),
        t0(int(blockIdx.y) * Shape::kQueries),
        chunk(t0 / p.length),
        stages(stages) {}
  __device__ int64_t record() const { return int64_t(head.b * f.G + head.g) * p.chunks() + chunk; }
  __device__ void copy_queries(Tile<T, 64> to, const View& x, int channels) const {
    copy_rows<Shape::kQueries, Shape::kThreads>(to, row_of<T>(x, head.b, head.h, t0), x.row,
                                                f.T - t0, channels);
  }
  // each(s0, k, v)
  template <class F>
  __device__ void over_keys(const F& each) const {
    constexpr int kKeys = Shape::kKeys;
    const auto tile = [&](int i) {
      return Tile<T, 64>{stages + uint32_t(i * kKeys * Shape::kRow)};
    };
    const auto copy = [&](int stage, int s0) {
      copy_rows<kKeys, Shape::kThreads>(tile(2 * stage), row_of<T>(f.k, head.b, head.g, s0),
                                        f.k.row, f.S - s0, f.D);
      copy_rows<kKeys, Shape::kThreads>(tile(2 * stage + 1), row_of<T>(f.v, head.b, head.g, s0),
                                        f.v.row, f.S - s0, f.E);
    };
    const int end = min(f.T, t0 + Shape::kQueries), begin = chunk * p.length;
    copy(0, begin);
    for (int s0 = begin, stage = 0; s0 < end; s0 += kKeys, stage ^= 1) {
      wait_for_copies();
      __syncthreads();
      if (s0 + kKeys < end) copy(stage ^ 1, s0 + kKeys);
      each(s0, tile(2 * stage), tile(2 * stage + 1));
    }
  }
};

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void chunk_forward_kernel(
    const __grid_constant__ Chunks p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, 64> q{shared_address(memory)};
  const ChunkQueries<T, Shape> block(p, q.at + Shape::kQueries * Shape::kRow);
  const Fused& f = p.f;
  const int own = warp() * 16 * Shape::kAtoms, t0 = block.t0 + own;
  block.copy_queries(q, f.q, f.D);
  RunningSums<T, 64, Quadratic, Shape> sums(f, p.w, block.head, t0 + lane() / 4);
  block.over_keys([&](int s0, Tile<T, 64> k, Tile<T, 64> v) {
    if (s0 >= t0 + 16 * Shape::kAtoms) return;
    float x[Shape::kAtoms][Shape::kKeys / 8][4];
    rows_by_rows<T>(x, q, own, k, 0);
    const Care care = care_for(f, t0, t0 + 16 * Shape::kAtoms, s0, s0 + Shape::kKeys);
    sums.weigh(care, x, s0, nullptr);
    add_sums_by_columns<T>(sums.N, x, v, 0);
  });
  if (block.chunk > 0) {
    float W[Shape::kAtoms][4] = {};
    over_state<T, Shape::kThreads>(p.before, block.record(), p.tiles(), p.blocks(), block.stages,
                                   block.stages + 2 * kStateStage,
                                   [&](const Monomials& m, const StateTile<T>& state) {
                                     ask<true>(sums.N, W, q, own, m, state);
                                   });
    const float* const constant = p.before.constant + block.record() * kConstantSums;
#pragma unroll
    for (int i = 0; i < 2 * Shape::kAtoms; ++i) {
      sums.sum[i / 2][i % 2] += W[i / 2][i % 2 * 2] + W[i / 2][i % 2 * 2 + 1];
      if (lane() % 4 == 0) sums.sum[i / 2][i % 2] += constant[64];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int n = 0; n < 2; ++n)
          sums.N[i / 2][j][i % 2 * 2 + n] += constant[8 * j + lane() % 4 * 2 + n];
    }
  }
  sums.finish();
}

// The gradients of scores of a row, in place of x.
template <class T, class Shape, int n>
__device__ inline void grade_rows(const ChunkQueries<T, Shape>& block, int t, int s0,
                                  const Query (&query)[2], float (&x)[n][4],
                                  const float (&dp)[n][4]) {
  const Fused& f = block.f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    Scored<2 * n> s;
    s.z = lanes<2 * n>([&](int j) { return x[j / 2][2 * r + j % 2] * f.scale; });
    s.dp = lanes<2 * n>([&](int j) { return dp[j / 2][2 * r + j % 2]; });
    s.a = lanes<2 * n>([&](int) { return query[r].a; });
    s.dW = lanes<2 * n>([&](int) { return query[r].dW; });
    s.limit = lanes<2 * n>([&](int) { return INFINITY; });
    s.seen = seen_keys<2 * n>(f.seen, block.head.b, t + 8 * r, s0 + lane() % 4 * 2);
    const auto y = graded<Care::any, 2 * n>(block.p.w, f, s, [](int) { return 0; });
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) x[j / 2][2 * r + j % 2] = y.dx[j];
  }
}

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void chunk_queries_kernel(
    const __grid_constant__ Chunks p) {
  constexpr int kAtoms = Shape::kAtoms, kHalf = Shape::kKeys / 2;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, 64> q{shared_address(memory)}, g{q.at + Shape::kQueries * Shape::kRow};
  const ChunkQueries<T, Shape> block(p, g.at + Shape::kQueries * Shape::kRow);
  const Fused& f = p.f;
  const int own = warp() * 16 * kAtoms, t0 = block.t0 + own;
  block.copy_queries(q, f.q, f.D);
  block.copy_queries(g, f.d_o, f.E);
  Query query[kAtoms][2];
#pragma unroll
  for (int i = 0; i < 2 * kAtoms; ++i) {
    const int t = t0 + 8 * i + lane() / 4;
    query[i / 2][i % 2] = f.queries[block.head.row(f, min(t, f.T - 1))];
    if (t >= f.T) query[i / 2][i % 2].a = query[i / 2][i % 2].dW = 0;
  }
  float dq[kAtoms][8][4] = {};
  block.over_keys([&](int s0, Tile<T, 64> k, Tile<T, 64> v) {
#pragma unroll 1
    for (int at = 0; at < Shape::kKeys; at += kHalf) {
      if (s0 + at >= t0 + 16 * kAtoms) return;
      float x[kAtoms][kHalf / 8][4], dp[kAtoms][kHalf / 8][4];
      rows_by_rows<T>(x, q, own, k, at);
      rows_by_rows<T>(dp, g, own, v, at);
#pragma unroll
      for (int i = 0; i < kAtoms; ++i)
        grade_rows(block, t0 + 16 * i + lane() / 4, s0 + at, query[i], x[i], dp[i]);
      add_sums_by_columns<T>(dq, x, k, at);
    }
  });
  const uint32_t columns = block.stages + 2 * kStateStage;
  float* const gradients = reinterpret_cast<float*>(memory + (columns - q.at) + kColumnBytes<T>);
  const Gradients<kAtoms> to{gradients + own * kGradientStride};
  to.set(dq, f.scale);
  if (block.chunk > 0) {
    AskBackward<T, kAtoms> back(q, g, own, to);
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      back.a[i / 2][i % 2] = query[i / 2][i % 2].a;
      back.b[i / 2][i % 2] = query[i / 2][i % 2].dW;
    }
    over_state<T, Shape::kThreads>(
        p.before, block.record(), p.tiles(), p.blocks(), block.stages, columns,
        [&](const Monomials& m, const StateTile<T>& state) { back.add(m, state); });
    back.flush();
  }
  to.template store<T>(f.dq, block.head.row(f, t0), f.D, f.T - t0, [](int) { return true; });
}

template <class T>
struct ChunkKeysShape : BackwardShape<T, 64, Quadratic> {
  using Base = BackwardShape<T, 64, Quadratic>;
  static constexpr bool kDecay = false, kCentre = false;
  static constexpr int kRow = 64 * int(sizeof(T));
  static constexpr int kStagesAt = 2 * Base::kKeys * kRow;  // of tiles of queries, then of a state
  static constexpr int kColumnsAt = kStagesAt + 2 * kStateStage;
  static constexpr int kQueriesAt = kColumnsAt + kColumnBytes<T>;
  static constexpr int kGradientsAt = kQueriesAt + 2 * Base::kQueries * int(sizeof(Query));
  static constexpr int kBytes = kGradientsAt + Base::kKeys * kGradientStride * 4;
  static_assert(4 * Base::kTileBytes == 2 * kStateStage);
};

template <class T>
__global__ __launch_bounds__(
    ChunkKeysShape<T>::kThreads,
    ChunkKeysShape<T>::kBlocks) void chunk_keys_kernel(const __grid_constant__ Chunks p) {
  using Shape = ChunkKeysShape<T>;
  using Sums = KeySums<T, 64, Quadratic, Shape>;
  constexpr int kKeys = Shape::kKeys, kQueries = Shape::kQueries, kThreads = Shape::kThreads;
  constexpr int kAtoms = Shape::kAtoms;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Fused& f = p.f;
  const Tile<T, 64> k{shared_address(memory)}, v{k.at + kKeys * Shape::kRow};
  const uint32_t stages = k.at + Shape::kStagesAt;
  const auto* const of = reinterpret_cast<const Query*>(memory + Shape::kQueriesAt);
  const int each = f.H / f.G, key_head = int(blockIdx.x), b = key_head / f.G, g = key_head % f.G;
  const int s0 = int(blockIdx.y) * kKeys, chunk = s0 / p.length;
  const int end = min(f.T, (chunk + 1) * p.length), begin = s0 / kQueries * kQueries;

  const auto queries = [&](int stage, int h, int t0) -> typename Sums::Queries {
    const Tile<T, 64> q{stages + uint32_t(stage * 2 * Shape::kTileBytes)};
    return {Head(b, g * each + h, g), t0,      q,       {q.at + Shape::kTileBytes},
            of + stage * kQueries,    nullptr, nullptr, {0}};
  };
  const auto copy = [&](int stage, int h, int t0) {
    const auto to = queries(stage, h, t0);
    const int real = end - t0, n = int(threadIdx.x);
    copy_rows<kQueries, kThreads>(to.q, row_of<T>(f.q, b, to.head.h, t0), f.q.row, real, f.D);
    copy_rows<kQueries, kThreads>(to.g, row_of<T>(f.d_o, b, to.head.h, t0), f.d_o.row, real, f.E);
    if (n < kQueries)
      copy_16_bytes(shared_address(to.of + n), f.queries + to.head.row(f, n < real ? t0 + n : 0),
                    n < real);
  };
  copy_rows<kKeys, kThreads>(k, row_of<T>(f.k, b, g, s0), f.k.row, f.S - s0, f.D);
  copy_rows<kKeys, kThreads>(v, row_of<T>(f.v, b, g, s0), f.v.row, f.S - s0, f.E);
  copy(0, 0, begin);
  Sums sums(f, p.w, s0, 0);
  int stage = 0;
  for (int h = 0, t0 = begin; h < each; stage ^= 1) {
    wait_for_copies();
    __syncthreads();  // these queries are there, and all are done with those before
    const auto tile = queries(stage, h, t0);
    if ((t0 += kQueries) >= end) t0 = begin, ++h;
    if (h < each) copy(stage ^ 1, h, t0);
    sums.add(tile, k, v);
  }
  const Gradients<kAtoms> to{reinterpret_cast<float*>(memory + Shape::kGradientsAt) +
                             sums.own * kGradientStride};
  to.set(sums.dk, f.scale);
  if (chunk + 1 < p.chunks()) {
    const int64_t record = int64_t(key_head) * p.chunks() + chunk;
    AskBackward<T, kAtoms> back(k, v, sums.own, to);
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) back.a[i / 2][i % 2] = back.b[i / 2][i % 2] = 1;
    float unused[kAtoms][4];
    over_state<T, kThreads>(p.behind, record, p.tiles(), p.blocks(), stages,
                            k.at + Shape::kColumnsAt,
                            [&](const Monomials& m, const StateTile<T>& state) {
                              ask<false>(sums.dv, unused, k, sums.own, m, state);
                              back.add(m, state);
                            });
    back.flush();
    const float* const constant = p.behind.constant + record * kConstantSums;
#pragma unroll
    for (int i = 0; i < kAtoms; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int n = 0; n < 4; ++n) sums.dv[i][j][n] += constant[8 * j + lane() % 4 * 2 + n % 2];
  }
  const int first = s0 + sums.own, rows = f.S - first;
  const int64_t at = int64_t(key_head) * f.S + first;
  const auto kept = [&](int r) {
    return !f.seen.keep || f.seen.keep[int64_t(b) * f.S + first + r];
  };
  to.template store<T>(f.dk, at, f.D, rows, kept);
  to.set(sums.dv, 1);
  to.template store<T>(f.dv, at, f.E, rows, kept);
}

}  // namespace horner::attn::kernels::cuda

// The states between chunks: sums over the tokens of each chunk, a warp some tiles of monomials,
// then from chunk to chunk.
#pragma once

#include "attn/exec/kernels/chunked_cuda_features.cuh"

namespace horner::attn::kernels::cuda {

// Tiles of a warp, warps, and blocks of them on a multiprocessor, at least.
template <class T, int own, int warps, int blocks>
struct SumsShape {
  static constexpr int kOwn = own, kWarps = warps, kThreads = 32 * warps, kTokens = 64;
  static constexpr int kBlocks = blocks;
  static constexpr int kTileBytes = kTokens * 64 * int(sizeof(T));
  static constexpr int kBytes = 4 * kTileBytes + 2 * kTokens * 4;
};

// The running sum of the log gates up to token t, that before the first being 0.
__device__ inline double gates_to(const Fused& f, int key_head, int t) {
  return t < 0 ? 0 : f.decay[int64_t(key_head) * f.S + t];
}

// What multiplies the values of token t, and its share in z. A chunk's keys have faded at its end,
// its queries see what was before it faded.
struct Share {
  float value, sum;
};
template <bool of_queries>
__device__ inline Share share(const Fused& f, int key_head, int head, int t, int begin, int end) {
  if (t >= end) return {0, 0};
  const int b = key_head / f.G;
  float left = 1;
  if (f.decay)
    left = of_queries ? fade(gates_to(f, key_head, t), gates_to(f, key_head, begin - 1))
                      : fade(gates_to(f, key_head, end - 1), gates_to(f, key_head, t));
  if constexpr (of_queries) {
    const Query query = f.queries[int64_t(b * f.H + head) * f.T + t];
    return {query.a * left, query.dW * left};
  } else {
    const bool kept = !f.seen.keep || f.seen.keep[int64_t(b) * f.S + t];
    return {kept ? left : 0, kept ? left : 0};
  }
}

template <class T>
__device__ inline void scale_chunk(uint32_t at, float by) {
  uint4* const words = static_cast<uint4*>(__cvta_shared_to_generic(at));
  uint4 w = *words;
  T* const x = reinterpret_cast<T*>(&w);
#pragma unroll
  for (int i = 0; i < 16 / int(sizeof(T)); ++i) x[i] = T(float(x[i]) * by);
  *words = w;
}

template <class T, class Shape, bool of_queries>
__global__ __launch_bounds__(Shape::kThreads,
                             Shape::kBlocks) void sums_kernel(const __grid_constant__ Chunks p) {
  constexpr int kTokens = Shape::kTokens, kThreads = Shape::kThreads, kOwn = Shape::kOwn;
  using M = Mma<T>;
  using Rows = Tile<T, 64>;
  static_assert(kThreads >= kTokens);
  constexpr int kStep = kThreads / Rows::kChunks, kRows = (kTokens + kStep - 1) / kStep;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Fused& f = p.f;
  float* const column = reinterpret_cast<float*>(memory + 4 * Shape::kTileBytes);
  const int all = p.tiles() + 1, parts = (all + kOwn * Shape::kWarps - 1) / (kOwn * Shape::kWarps);
  const int key_head = int(blockIdx.x) / parts, b = key_head / f.G, g = key_head % f.G;
  const int each = of_queries ? f.H / f.G : 1;
  const int begin = int(blockIdx.y) * p.length, end = min(f.T, begin + p.length);
  const int first = (int(blockIdx.x) % parts * Shape::kWarps + warp()) * kOwn;
  Monomials m[kOwn];
#pragma unroll
  for (int o = 0; o < kOwn; ++o) m[o] = monomials(min(first + o, all - 2), p.blocks());

  const auto tile = [&](int i) { return Rows{shared_address(memory + i * Shape::kTileBytes)}; };
  const bool shares = of_queries || f.seen.keep || f.decay;
  const int row = int(threadIdx.x) / Rows::kChunks, chunk = int(threadIdx.x) % Rows::kChunks;
  float by[kRows], own = 0;  // of what is being copied
  const auto copy = [&](int stage, int r, int t0) {
    const View &x = of_queries ? f.q : f.k, &y = of_queries ? f.d_o : f.v;
    const int head = g * each + r, real = end - t0;
    copy_rows<kTokens, kThreads>(tile(2 * stage), row_of<T>(x, b, head, t0), x.row, real, f.D);
    copy_rows<kTokens, kThreads>(tile(2 * stage + 1), row_of<T>(y, b, head, t0), y.row, real, f.E);
    if (shares)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        by[i] = share<of_queries>(f, key_head, head, t0 + row + i * kStep, begin, end).value;
    if (threadIdx.x < kTokens)
      own = share<of_queries>(f, key_head, head, t0 + int(threadIdx.x), begin, end).sum;
  };
  copy(0, 0, begin);
  float S[kOwn][8][4] = {}, z[kOwn][4] = {};
  int stage = 0;
  for (int r = 0, t0 = begin; r < each; stage ^= 1) {
    wait_for_copies();
    const Rows x = tile(2 * stage), y = tile(2 * stage + 1);
    if (shares)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (row + i * kStep < kTokens) scale_chunk<T>(y.chunk(row + i * kStep, chunk), by[i]);
    if (threadIdx.x < kTokens) column[stage * kTokens + threadIdx.x] = own;
    __syncthreads();  // these tokens are there, and all are done with those before
    if ((t0 += kTokens) >= end) t0 = begin, ++r;
    if (r < each) copy(stage ^ 1, r, t0);
    const typename M::template RightColumns<64> rights(y, 0, 0);
#pragma unroll
    for (int k = 0; k < kTokens; k += M::kDepth) {
      typename M::B right[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) right[j] = rights.at(k, 16 * j);
      const auto ones = Factors<T>::column(column + stage * kTokens + k);
#pragma unroll
      for (int o = 0; o < kOwn; ++o) {
        if (first + o >= all) break;
        const auto left =
            first + o == all - 1 ? Factors<T>::constant() : Factors<T>::columns(x, k, m[o]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          M::template multiply<true>(S[o][2 * j], S[o][2 * j + 1], left, right[j]);
        Factors<T>::add_column(z[o], left, ones);
      }
    }
  }
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    if (first + o >= all) break;
    float* const to =
        p.sums + ((int64_t(key_head) * p.chunks() + blockIdx.y) * all + first + o) * kTileSums;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int feature = lane() / 4 + 8 * r;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<float2*>(to + feature * 64 + 8 * j + lane() % 4 * 2) =
            make_float2(S[o][j][2 * r], S[o][j][2 * r + 1]);
      if (lane() % 4 == 0) to[1024 + feature] = z[o][2 * r] + z[o][2 * r + 1];
    }
  }
}

// A thread has two neighbours of the sums, and goes from chunk to chunk.
inline constexpr int kScanThreads = 128;
template <class T, bool backwards>
__global__ __launch_bounds__(kScanThreads) void scan_kernel(const __grid_constant__ Chunks p) {
  constexpr int kPairs = kTileSums / 2, kAtOnce = 8;
  const ChunkStates& to = backwards ? p.behind : p.before;
  const int tiles = p.tiles(), all = tiles + 1, chunks = p.chunks();
  const int at = int(blockIdx.x) * kScanThreads + int(threadIdx.x);
  if (at >= all * kPairs) return;
  const int u = at / kPairs, pair_at = at % kPairs * 2;
  const float by = u == tiles ? p.w.c[0] : coefficient(p.w, p.f.scale, monomials(u, p.blocks()));
  const int64_t head = int64_t(blockIdx.y) * chunks;
  float2 sum{};
  for (int c0 = 0; c0 < chunks; c0 += kAtOnce) {
    float2 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int c = min(c0 + i, chunks - 1);
      const int64_t record = head + (backwards ? chunks - 1 - c : c);
      x[i] = *reinterpret_cast<const float2*>(p.sums + (record * all + u) * kTileSums + pair_at);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (c0 + i >= chunks) return;
      const int64_t record = head + (backwards ? chunks - 1 - c0 - i : c0 + i);
      const float a = sum.x * by, b = sum.y * by;
      if (p.f.decay) {
        const int first = int(record - head) * p.length, last = min(p.f.S, first + p.length) - 1;
        const float left =
            fade(gates_to(p.f, int(blockIdx.y), last), gates_to(p.f, int(blockIdx.y), first - 1));
        sum.x *= left, sum.y *= left;
      }
      sum.x += x[i].x, sum.y += x[i].y;
      if (u == tiles) {
        float* const constant = to.constant + record * kConstantSums;
        if (pair_at < 64) constant[pair_at] = a, constant[pair_at + 1] = b;
        if (pair_at == 1024) constant[64] = a;
      } else if (pair_at < 1024) {
        store_pair<T>(to.S, (record * tiles + u) * 1024 + pair_at, a, b);
      } else {
        Factors<T>::store_column(to.z + (record * tiles + u) * kTileColumn, pair_at - 1024, a, b);
      }
    }
  }
}

}  // namespace horner::attn::kernels::cuda

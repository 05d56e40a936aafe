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

// What multiplies the values of token t, and its share in z: 0 outside of the chunk.
struct Share {
  float value, sum;
};
template <bool of_queries>
__device__ inline Share share(const Fused& f, int key_head, int head, int t, int end) {
  const int b = key_head / f.G;
  if (t >= end) return {0, 0};
  if constexpr (of_queries) {
    const Query& query = f.queries[int64_t(b * f.H + head) * f.T + t];
    return {query.a, query.dW};
  } else {
    const float kept = !f.seen.keep || f.seen.keep[int64_t(b) * f.S + t] ? 1 : 0;
    return {kept, kept};
  }
}
// What is left of a key of a chunk at its end, or for a query of what was before the chunk.
template <bool of_queries>
__device__ inline float left_of(const Fused& f, int key_head, int t, int begin, int end) {
  if (!f.decay || t >= end) return 1;
  return of_queries ? fade(gates_to(f, key_head, t), gates_to(f, key_head, begin - 1))
                    : fade(gates_to(f, key_head, end - 1), gates_to(f, key_head, t));
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

// Of a tile: [16, 64] and [16].
__device__ inline void store_sums(float* to, const float (&S)[8][4], const float (&z)[4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int feature = lane() / 4 + 8 * r;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *reinterpret_cast<float2*>(to + feature * 64 + 8 * j + lane() % 4 * 2) =
          make_float2(S[j][2 * r], S[j][2 * r + 1]);
    if (lane() % 4 == 0) to[1024 + feature] = z[2 * r] + z[2 * r + 1];
  }
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
  for (int o = 0; o < kOwn; ++o) m[o] = monomials(min(first + o, all - 2), all - 1, p.blocks());

  const auto tile = [&](int i) { return Rows{shared_address(memory + i * Shape::kTileBytes)}; };
  const bool shares = of_queries || f.seen.keep || f.decay;
  const int row = int(threadIdx.x) / Rows::kChunks, chunk = int(threadIdx.x) % Rows::kChunks;
  // Of what is being copied: asked for early, used when it is there.
  float by[kRows], left[kRows], own = 0, own_left = 1;
  const auto copy = [&](int stage, int r, int t0) {
    const View &x = of_queries ? f.q : f.k, &y = of_queries ? f.d_o : f.v;
    const int head = g * each + r, real = end - t0;
    copy_rows<kTokens, kThreads>(tile(2 * stage), row_of<T>(x, b, head, t0), x.row, real, f.D);
    copy_rows<kTokens, kThreads>(tile(2 * stage + 1), row_of<T>(y, b, head, t0), y.row, real, f.E);
    if (shares)
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int t = t0 + row + i * kStep;
        by[i] = share<of_queries>(f, key_head, head, t, end).value;
        left[i] = left_of<of_queries>(f, key_head, t, begin, end);
      }
    if (threadIdx.x < kTokens) {
      const int t = t0 + int(threadIdx.x);
      own = share<of_queries>(f, key_head, head, t, end).sum;
      own_left = left_of<of_queries>(f, key_head, t, begin, end);
    }
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
        if (row + i * kStep < kTokens)
          scale_chunk<T>(y.chunk(row + i * kStep, chunk), by[i] * left[i]);
    if (threadIdx.x < kTokens) column[stage * kTokens + threadIdx.x] = own * own_left;
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
    store_sums(to, S[o], z[o]);
  }
}

// The same of products of two blocks, 16-bit: a block of threads has one pair of them, a warp two
// first factors; one block of threads more has the channels themselves and the constant.
struct PairSumsShape {
  static constexpr int kTokens = 64, kWarps = 8, kThreads = 32 * kWarps, kOwn = 2, kBlocks = 2;
  static constexpr int kTileBytes = kTokens * 128, kBytes = 4 * kTileBytes + 2 * kTokens * 4;
};
template <bool of_queries>
struct PairSums {
  using M = Mma<bf16>;
  using Rows = Tile<bf16, 64>;
  static constexpr int kTokens = PairSumsShape::kTokens;
  int first, second;  // blocks; or -1 and the one of the channels themselves
  bool constant;
  float S[2][8][4], z[2][4];

  __device__ void add(int o, const M::A& left, const M::B (&right)[4], const M::B& ones) {
#pragma unroll
    for (int j = 0; j < 4; ++j) M::multiply<true>(S[o][2 * j], S[o][2 * j + 1], left, right[j]);
    Factors<bf16>::add_column(z[o], left, ones);
  }
  __device__ void add(Rows x, Rows y, const float* column) {
    const M::LeftColumns<64> seconds(x, 0, 16 * second), firsts(x, 0, 16 * max(first, 0));
    const M::RightColumns<64> rights(y, 0, 0);
    const bool low = warp() < 4;
#pragma unroll
    for (int t = 0; t < kTokens; t += 16) {
      M::B right[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) right[j] = rights.at(t, 16 * j);
      const M::B ones = Factors<bf16>::column(column + t);
      const M::A of_second = constant ? Factors<bf16>::constant() : seconds.at(t, 0);
      if (first < 0) {
        add(0, of_second, right, ones);
        continue;
      }
      const M::A of_first = firsts.at(t, 0);
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        const int from = (2 * warp() + o) % 8 * 4 + lane() % 4;
        const uint32_t x0 = __shfl_sync(~0u, low ? of_first.x[0] : of_first.x[1], from);
        const uint32_t x1 = __shfl_sync(~0u, low ? of_first.x[2] : of_first.x[3], from);
        M::A left;
#pragma unroll
        for (int j = 0; j < 4; ++j) left.x[j] = times(bf16(), of_second.x[j], j < 2 ? x0 : x1);
        add(o, left, right, ones);
      }
    }
  }
};

template <bool of_queries>
__global__ __launch_bounds__(PairSumsShape::kThreads, PairSumsShape::kBlocks) void pair_sums_kernel(
    const __grid_constant__ Chunks p) {
  using Shape = PairSumsShape;
  using Rows = Tile<bf16, 64>;
  constexpr int kTokens = Shape::kTokens, kThreads = Shape::kThreads;
  constexpr int kStep = kThreads / Rows::kChunks, kRows = kTokens / kStep;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Fused& f = p.f;
  float* const column = reinterpret_cast<float*>(memory + 4 * Shape::kTileBytes);
  const int tiles = p.tiles(), pairs = (tiles - p.blocks()) / 16, parts = pairs + 1;
  const int key_head = int(blockIdx.x) / parts, part = int(blockIdx.x) % parts;
  const int b = key_head / f.G, g = key_head % f.G, each = of_queries ? f.H / f.G : 1;
  const int begin = int(blockIdx.y) * p.length, end = min(f.T, begin + p.length);
  const Monomials m = monomials(16 * part, tiles, p.blocks());
  PairSums<of_queries> sums{};
  const bool is_pair = part < pairs;
  sums.first = is_pair ? m.i / 16 : -1, sums.second = is_pair ? m.block : min(warp(), 3);
  sums.constant = !is_pair && warp() == p.blocks();
  const bool works = is_pair || warp() <= p.blocks();

  const auto tile = [&](int i) { return Rows{shared_address(memory + i * Shape::kTileBytes)}; };
  const bool shares = of_queries || f.seen.keep || f.decay;
  const int row = int(threadIdx.x) / Rows::kChunks, chunk = int(threadIdx.x) % Rows::kChunks;
  // Of what is being copied: asked for early, used when it is there.
  float by[kRows], left[kRows], own = 0, own_left = 1;
  const auto copy = [&](int stage, int r, int t0) {
    const View &x = of_queries ? f.q : f.k, &y = of_queries ? f.d_o : f.v;
    const int head = g * each + r, real = end - t0;
    copy_rows<kTokens, kThreads>(tile(2 * stage), row_of<bf16>(x, b, head, t0), x.row, real, f.D);
    copy_rows<kTokens, kThreads>(tile(2 * stage + 1), row_of<bf16>(y, b, head, t0), y.row, real,
                                 f.E);
    if (shares)
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int t = t0 + row + i * kStep;
        by[i] = share<of_queries>(f, key_head, head, t, end).value;
        left[i] = left_of<of_queries>(f, key_head, t, begin, end);
      }
    if (threadIdx.x < kTokens) {
      const int t = t0 + int(threadIdx.x);
      own = share<of_queries>(f, key_head, head, t, end).sum;
      own_left = left_of<of_queries>(f, key_head, t, begin, end);
    }
  };
  copy(0, 0, begin);
  int stage = 0;
  for (int r = 0, t0 = begin; r < each; stage ^= 1) {
    wait_for_copies();
    const Rows x = tile(2 * stage), y = tile(2 * stage + 1);
    if (shares)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        scale_chunk<bf16>(y.chunk(row + i * kStep, chunk), by[i] * left[i]);
    if (threadIdx.x < kTokens) column[stage * kTokens + threadIdx.x] = own * own_left;
    __syncthreads();  // these tokens are there, and all are done with those before
    if ((t0 += kTokens) >= end) t0 = begin, ++r;
    if (r < each) copy(stage ^ 1, r, t0);
    if (works) sums.add(x, y, column + stage * kTokens);
  }
  if (!works) return;
  const int first = is_pair ? 16 * part + 2 * warp() : sums.constant ? tiles : 16 * part + warp();
  float* const to =
      p.sums + ((int64_t(key_head) * p.chunks() + blockIdx.y) * (tiles + 1) + first) * kTileSums;
#pragma unroll
  for (int o = 0; o < 2; ++o)
    if (o == 0 || is_pair) store_sums(to + o * kTileSums, sums.S[o], sums.z[o]);
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
  const float by =
      u == tiles ? p.w.c[0] : coefficient(p.w, p.f.scale, monomials(u, tiles, p.blocks()));
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

// Chunks, independent of each other given the states: each thread block owns a block of queries, or
// of keys, and sums the contributions of the state and of the scores within the chunk.
#pragma once

#include "attn/kernels/cuda/chunked/apply_state.cuh"
#include "attn/kernels/cuda/chunked/states.cuh"
#include "attn/kernels/cuda/common/key_gradients.cuh"
#include "attn/kernels/cuda/common/row_sums.cuh"

namespace horner::attn::kernels::cuda {

// 16-row atoms per warp, warps, minimum blocks per SM, and whether there is a decay: code without
// it needs fewer registers.
template <class T, int atoms, int warps, int blocks, bool decay>
struct ChunkShape {
  static constexpr bool kDecay = decay, kRaw = false;
  static constexpr int kAtoms = atoms, kWarps = warps, kThreads = 32 * warps, kBlocks = blocks;
  static constexpr int kQueries = 16 * atoms * warps;
  static constexpr int kKeys = sizeof(T) == 4 ? 32 : 64;
  static constexpr int kRow = 64 * int(sizeof(T));
  // After the queries: tiles of keys or of a state, its columns z, gates.
  static constexpr int kColumnsAt = 2 * kStateStage, kGatesAt = kColumnsAt + kColumnBytes<T>;
  static constexpr int kTilesBytes = kGatesAt + 2 * kKeys * 8;
  static constexpr int kForwardBytes = kQueries * kRow + kTilesBytes;
  static constexpr int kQueriesBytes =
      2 * kQueries * kRow + kTilesBytes + kQueries * kGradientStride * 4;
  static_assert(4 * kKeys * kRow == 2 * kStateStage);
};

// A block of queries of one head, and the keys of its chunk, double-buffered in shared memory.
template <class T, class Shape>
struct ChunkQueries {
  const Chunks& p;
  const Fused& f;
  Head head;
  int t0, chunk;
  unsigned char* tiles;

  __device__ ChunkQueries(const Chunks& p, unsigned char* tiles)
      : p(p),
        f(p.f),
        head(f, int(blockIdx.x)),
        t0(int(blockIdx.y) * Shape::kQueries),
        chunk(t0 / p.length),
        tiles(tiles) {}
  __device__ int key_head() const { return head.b * f.G + head.g; }
  __device__ int64_t record() const { return int64_t(key_head()) * p.chunks() + chunk; }
  __device__ void copy_queries(Tile<T, 64> to, const View& x, int channels) const {
    copy_rows<Shape::kQueries, Shape::kThreads>(to, row_of<T>(x, head.b, head.h, t0), x.row,
                                                f.T - t0, channels);
  }
  // The decay factor of the state at query t.
  __device__ float state_decay(int t) const {
    if (!Shape::kDecay) return 1;
    return decay_factor(gates_to(f, key_head(), min(t, f.T - 1)),
                        gates_to(f, key_head(), chunk * p.length - 1));
  }
  template <class F>
  __device__ void over_state(const F& each) const {
    const uint32_t at = shared_address(tiles);
    cuda::over_state<T, Shape::kThreads>(p.prefix, record(), p.tiles(), p.blocks(), at,
                                         at + Shape::kColumnsAt, each);
    __syncthreads();  // all warps are done with the last tiles
  }
  // Calls each(s0, k, v, gates) for every tile of keys.
  template <class F>
  __device__ void over_keys(const F& each) const {
    constexpr int kKeys = Shape::kKeys;
    double* const gates = reinterpret_cast<double*>(tiles + Shape::kGatesAt);
    const auto tile = [&](int i) {
      return Tile<T, 64>{shared_address(tiles + i * kKeys * Shape::kRow)};
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
      if (Shape::kDecay && threadIdx.x < kKeys)
        gates[stage * kKeys + threadIdx.x] = gates_at_key(f, head, s0 + int(threadIdx.x));
      cp_async_wait_all();
      __syncthreads();
      if (s0 + kKeys < end) copy(stage ^ 1, s0 + kKeys);
      each(s0, tile(2 * stage), tile(2 * stage + 1), gates + stage * kKeys);
    }
  }
};

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void chunk_forward_kernel(
    const __grid_constant__ Chunks p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, 64> q{shared_address(memory)};
  const ChunkQueries<T, Shape> block(p, memory + Shape::kQueries * Shape::kRow);
  const Fused& f = p.f;
  const int own = warp() * 16 * Shape::kAtoms, t0 = block.t0 + own;
  block.copy_queries(q, f.q, f.D);
  RunningSums<T, 64, Quadratic, Shape> sums(f, p.w, block.head, t0 + lane() / 4);
  const auto apply_prefix_state = [&] {
    if (block.chunk == 0) return;
    float W[4] = {};
    block.over_state(
        [&](const Stage<T>& stage) { apply_state<true>(sums.N[0], W, q, own, stage); });
    const float* const constant = p.prefix.constant + block.record() * kConstantSums;
#pragma unroll
    for (int i = 0; i < 2 * Shape::kAtoms; ++i) {
      const float decay = block.state_decay(sums.query(i));
      if (lane() % 4 == 0) sums.sum[0][i] += (W[2 * i] + W[2 * i + 1] + constant[64]) * decay;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        float& y = sums.N[i / 2][j / 2][i % 2 * 2 + j % 2];
        y = (y + constant[j / 2 * 8 + lane() % 4 * 2 + j % 2]) * decay;
      }
    }
  };
  if (Shape::kDecay) apply_prefix_state();  // first: the decay factor multiplies N and the sum
  block.over_keys([&](int s0, Tile<T, 64> k, Tile<T, 64> v, const double* gates) {
    if (s0 >= t0 + 16 * Shape::kAtoms) return;
    float x[Shape::kAtoms][Shape::kKeys / 8][4];
    mma_abt<T>(x, q, own, k, 0);
    const Path path = path_for(f, t0, t0 + 16 * Shape::kAtoms, s0, s0 + Shape::kKeys);
    sums.to_weights(path, x, s0, gates);
    mma_ab_rs<T>(sums.N, x, v, 0);
  });
  if (!Shape::kDecay) apply_prefix_state();
  sums.finish();
}

// Score gradients of a thread's two rows, in place of x. Adds the weights times their gradients to
// `d_decay`.
template <Path path, class T, class Shape, int n>
__device__ inline void score_gradients(const ChunkQueries<T, Shape>& block, int t, int s0,
                                       const Query (&query)[2], const double* gates,
                                       float (&x)[n][4], const float (&dp)[n][4],
                                       DecaySum<T> (&d_decay)[2]) {
  const Fused& f = block.f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    Scores<2 * n> s;
    s.z = vec<2 * n>([&](int j) { return x[j / 2][2 * r + j % 2] * f.scale; });
    s.dp = vec<2 * n>([&](int j) { return dp[j / 2][2 * r + j % 2]; });
    s.a = vec<2 * n>([&](int) { return query[r].a; });
    s.dW = vec<2 * n>([&](int) { return query[r].dW; });
    s.limit = vec<2 * n>([&](int) { return INFINITY; });
    if constexpr (path == Path::general)
      s.seen = seen_keys<2 * n>(f.seen, block.head.b, t + 8 * r, s0 + lane() % 4 * 2);
    if (Shape::kDecay) {
      const double here = gates_at_query(f, block.head, t + 8 * r);
      const auto decay = vec<2 * n>([&](int j) {
        const double key = gates[lane() % 4 * 2 + j / 2 * 8 + j % 2];
        return s.seen >> j & 1 ? decay_factor(here, key) : 0;
      });
      s.a = s.a * decay, s.dW = s.dW * decay;
    }
    const auto y = score_gradients<path, 2 * n>(block.p.w, f, s, [](int) { return 0; });
#pragma unroll
    for (int j = 0; j < 2 * n; ++j) {
      x[j / 2][2 * r + j % 2] = y.dx[j];
      if (Shape::kDecay) d_decay[r] += y.w[j] * (s.a[j] * s.dp[j] + s.dW[j]);
    }
  }
}

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void chunk_backward_queries_kernel(
    const __grid_constant__ Chunks p) {
  constexpr int kAtoms = Shape::kAtoms, kHalf = Shape::kKeys / 2;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, 64> q{shared_address(memory)}, g{q.at + Shape::kQueries * Shape::kRow};
  unsigned char* const tiles = memory + 2 * Shape::kQueries * Shape::kRow;
  const ChunkQueries<T, Shape> block(p, tiles);
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
  DecaySum<T> d_decay[2] = {};
  block.over_keys([&](int s0, Tile<T, 64> k, Tile<T, 64> v, const double* gates) {
#pragma unroll 1
    for (int at = 0; at < Shape::kKeys; at += kHalf) {
      if (s0 + at >= t0 + 16 * kAtoms) return;
      float x[kAtoms][kHalf / 8][4], dp[kAtoms][kHalf / 8][4];
      mma_abt<T>(x, q, own, k, at);
      mma_abt<T>(dp, g, own, v, at);
      const int t = t0 + lane() / 4;
      if (Shape::kDecay || is_partial(f.seen, t0, t0 + 16, s0 + at, s0 + at + kHalf))
        score_gradients<Path::general>(block, t, s0 + at, query[0], gates + at, x[0], dp[0],
                                       d_decay);
      else
        score_gradients<Path::plain>(block, t, s0 + at, query[0], gates + at, x[0], dp[0], d_decay);
      mma_ab_rs<T>(dq, x, k, at);
    }
  });
  float* const gradients = reinterpret_cast<float*>(tiles + Shape::kTilesBytes);
  const Gradients to{gradients + own * kGradientStride};
  to.set(dq[0], f.scale);
  if (block.chunk > 0) {
    ApplyStateBackward<T, Shape::kDecay> back(q, g, own, to);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Query& row = query[0][i];  // dW is 0 where a is 0
      back.a[i] = row.a * block.state_decay(t0 + 8 * i + lane() / 4);
      back.b[i] = row.a == 0 ? 0 : row.dW / row.a;
    }
    back.prepare();
    block.over_state([&](const Stage<T>& stage) { back.add(stage); });
    if constexpr (Shape::kDecay) {
      const float* const constant = p.prefix.constant + block.record() * kConstantSums;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        DecaySum<T> sum = back.total[i] + (lane() % 4 == 0 ? constant[64] * back.b[i] : 0);
        for (int j = 0; j < 16; ++j) {
          const int e = j / 2 * 8 + lane() % 4 * 2 + j % 2;
          sum += constant[e] * load_element(T(), g.element(own + 8 * i + lane() / 4, e));
        }
        d_decay[i] += sum * back.a[i];
      }
    }
  }
  if constexpr (Shape::kDecay)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = t0 + 8 * i + lane() / 4;
      DecaySum<T> sum = d_decay[i];
      for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (f.d_decay_key && lane() % 4 == 0 && t < f.T)
        *d_decay_at<T>(f, block.head.row(f, t)) = sum;
    }
  to.template store<T>(f.dq, block.head.row(f, t0), f.D, f.T - t0, [](int) { return true; });
}

template <class T, int atoms, int warps, int blocks, bool decay>
struct ChunkKeysShape {
  static constexpr bool kDecay = decay;
  static constexpr int kAtoms = atoms, kWarps = warps, kThreads = 32 * warps, kBlocks = blocks;
  static constexpr int kKeys = 16 * atoms * warps, kQueries = sizeof(T) == 4 ? 32 : 64;
  static constexpr int kTilesPerStep = 2, kStep = 16, kOwn = 64;  // for KeyGradients
  static constexpr int kRow = 64 * int(sizeof(T)), kTileBytes = kQueries * kRow;
  static constexpr int kStagesAt = 2 * kKeys * kRow;  // tiles of queries or of a state
  static constexpr int kColumnsAt = kStagesAt + 2 * kStateStage;
  static constexpr int kQueriesAt = kColumnsAt + kColumnBytes<T>;
  static constexpr int kGatesAt = kQueriesAt + 2 * kQueries * int(sizeof(Query));
  static constexpr int kGradientsAt = kGatesAt + 2 * kQueries * 8;
  static constexpr int kBytes = kGradientsAt + kKeys * kGradientStride * 4;
  static_assert(4 * kTileBytes == 2 * kStateStage);
};

// Adds the queries after the chunk: dv and the gates' gradient to `sums`, dk to `to`.
template <class T, class Shape, class Sums>
__device__ inline void apply_suffix_state(const Chunks& p, int key_head, int chunk, Tile<T, 64> k,
                                          Tile<T, 64> v, Sums& sums, const Gradients& to) {
  static_assert(Shape::kAtoms == 1);
  const Fused& f = p.f;
  const int64_t record = int64_t(key_head) * p.chunks() + chunk;
  const int last = min(f.S, (chunk + 1) * p.length) - 1;
  ApplyStateBackward<T, false> back(k, v, sums.own, to);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    back.a[i] = back.b[i] = 1;
    if (Shape::kDecay)
      back.a[i] = decay_factor(gates_to(f, key_head, last),
                               gates_to(f, key_head, min(sums.key(i), f.S - 1)));
  }
  back.prepare();
  float W[4] = {};
  const auto each = [&](const Stage<T>& stage) {
    apply_state<Shape::kDecay>(sums.dv[0], W, k, sums.own, stage);
    back.add(stage);
  };
  over_state<T, Shape::kThreads>(p.suffix, record, p.tiles(), p.blocks(), k.at + Shape::kStagesAt,
                                 k.at + Shape::kColumnsAt, each);
  __syncthreads();  // all warps are done with the last tiles
  const float* const constant = p.suffix.constant + record * kConstantSums;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float decay = back.a[i];
    float d_decay = lane() % 4 == 0 ? (W[2 * i] + W[2 * i + 1] + constant[64]) * decay : 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float& y = sums.dv[i / 2][j / 2][i % 2 * 2 + j % 2];
      const int e = j / 2 * 8 + lane() % 4 * 2 + j % 2;
      y = (y + constant[e]) * decay;
      if (Shape::kDecay)
        d_decay += y * load_element(T(), v.element(sums.own + 8 * i + lane() / 4, e));
    }
    sums.d_decay[i / 2][i % 2] += d_decay;
  }
}

// Stores dk (from `to`), dv and the gradient of the gates; 0 for masked keys.
template <class T, class Shape, class Sums>
__device__ inline void store_keys(const Fused& f, int key_head, const Sums& sums,
                                  const Gradients& to) {
  const int first = sums.s0 + sums.own, rows = f.S - first;
  const int64_t at = int64_t(key_head) * f.S + first;
  const uint8_t* const keep = f.seen.keep ? f.seen.keep + int64_t(key_head / f.G) * f.S : nullptr;
  const auto kept = [&](int r) { return !keep || keep[first + r]; };
  to.template store<T>(f.dk, at, f.D, rows, kept);
  to.set(sums.dv[0], 1);
  to.template store<T>(f.dv, at, f.E, rows, kept);
  if constexpr (Shape::kDecay) {
#pragma unroll
    for (int i = 0; i < 2 * Shape::kAtoms; ++i) {
      double d = sums.d_decay[i / 2][i % 2];
      d += __shfl_xor_sync(~0u, d, 1);
      d += __shfl_xor_sync(~0u, d, 2);
      const int s = 8 * i + lane() / 4;
      if (f.d_decay_key && lane() % 4 == 0 && s < rows) f.d_decay_key[at + s] = kept(s) ? -d : 0;
    }
  }
}

template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void chunk_backward_keys_kernel(
    const __grid_constant__ Chunks p) {
  using Sums = KeyGradients<T, 64, Quadratic, Shape>;
  constexpr int kKeys = Shape::kKeys, kQueries = Shape::kQueries, kThreads = Shape::kThreads;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Fused& f = p.f;
  const Tile<T, 64> k{shared_address(memory)}, v{k.at + kKeys * Shape::kRow};
  const auto* const of = reinterpret_cast<const Query*>(memory + Shape::kQueriesAt);
  double* const gates = reinterpret_cast<double*>(memory + Shape::kGatesAt);
  const int each = f.H / f.G, key_head = int(blockIdx.x), b = key_head / f.G, g = key_head % f.G;
  const int s0 = int(blockIdx.y) * kKeys, chunk = s0 / p.length;
  const int end = min(f.T, (chunk + 1) * p.length), begin = s0 / kQueries * kQueries;

  const auto queries = [&](int stage, int h, int t0) -> typename Sums::Queries {
    const Tile<T, 64> q{k.at + Shape::kStagesAt + uint32_t(stage * 2 * Shape::kTileBytes)};
    const Tile<T, 64> d_o{q.at + Shape::kTileBytes};
    const int at = stage * kQueries;
    return {Head(b, g * each + h, g), t0, q, d_o, of + at, gates + at, {0}};
  };
  const auto copy = [&](int stage, int h, int t0) {
    const auto to = queries(stage, h, t0);
    const int real = end - t0, n = int(threadIdx.x);
    copy_rows<kQueries, kThreads>(to.q, row_of<T>(f.q, b, to.head.h, t0), f.q.row, real, f.D);
    copy_rows<kQueries, kThreads>(to.g, row_of<T>(f.d_o, b, to.head.h, t0), f.d_o.row, real, f.E);
    if (n >= kQueries) return;
    cp_async_16(shared_address(to.of + n), f.queries + to.head.row(f, n < real ? t0 + n : 0),
                n < real);
    if (Shape::kDecay) gates[stage * kQueries + n] = gates_at_query(f, to.head, t0 + n);
  };
  copy_rows<kKeys, kThreads>(k, row_of<T>(f.k, b, g, s0), f.k.row, f.S - s0, f.D);
  copy_rows<kKeys, kThreads>(v, row_of<T>(f.v, b, g, s0), f.v.row, f.S - s0, f.E);
  Sums sums(f, p.w, s0, 0);
  const Gradients to{reinterpret_cast<float*>(memory + Shape::kGradientsAt) +
                     sums.own * kGradientStride};
  const bool last = chunk + 1 == p.chunks();
  if (Shape::kDecay && !last) {  // first: the decay factor multiplies dv
    to.set(sums.dk[0], 0);
    cp_async_wait_all();
    __syncthreads();
    apply_suffix_state<T, Shape>(p, key_head, chunk, k, v, sums, to);
  }
  copy(0, 0, begin);
  int stage = 0;
  for (int h = 0, t0 = begin; h < each; stage ^= 1) {
    cp_async_wait_all();
    __syncthreads();  // these queries have arrived; all warps are done with the last ones
    const auto tile = queries(stage, h, t0);
    if ((t0 += kQueries) >= end) t0 = begin, ++h;
    if (h < each) copy(stage ^ 1, h, t0);
    if (tile.t0 + kQueries > s0 + sums.own) sums.add(tile, k, v);
  }
  if constexpr (Shape::kDecay) {
    last ? to.set(sums.dk[0], f.scale) : to.template set<true>(sums.dk[0], f.scale);
  } else {
    to.set(sums.dk[0], f.scale);
    if (!last) apply_suffix_state<T, Shape>(p, key_head, chunk, k, v, sums, to);
  }
  store_keys<T, Shape>(f, key_head, sums, to);
}

}  // namespace horner::attn::kernels::cuda

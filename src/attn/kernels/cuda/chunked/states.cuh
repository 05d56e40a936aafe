// The states between chunks: sums over the tokens of each chunk, where each warp owns some tiles of
// monomials, then a scan of states over the chunks.
#pragma once

#include "attn/kernels/cuda/chunked/features.cuh"

namespace horner::attn::kernels::cuda {

// Factors of token t: on its values, and on its features in z. 0 outside the chunk.
struct TokenFactor {
  float value, sum;
};
template <bool of_queries>
__device__ inline TokenFactor token_factor(const Fused& f, int key_head, int head, int t, int end) {
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
// Decay factor from a key to the end of its chunk, or from the start of the chunk to a query.
template <bool of_queries>
__device__ inline float decay_to_boundary(const Fused& f, int key_head, int t, int begin, int end) {
  if (!f.decay || t >= end) return 1;
  return of_queries ? decay_factor(gates_to(f, key_head, t), gates_to(f, key_head, begin - 1))
                    : decay_factor(gates_to(f, key_head, end - 1), gates_to(f, key_head, t));
}

// The tokens of a chunk, double-buffered in shared memory; for queries, those of every head that
// reads the key head. y is multiplied by its factor.
template <class T, int threads, bool of_queries>
struct SummedTokens {
  using Rows = Tile<T, 64>;
  static constexpr int kTokens = 64, kTileBytes = kTokens * Rows::kRow;
  static constexpr int kBytes = 4 * kTileBytes + 2 * kTokens * 4;
  static constexpr int kStep = threads / Rows::kChunks, kRows = (kTokens + kStep - 1) / kStep;
  static_assert(threads >= kTokens);

  const Chunks& p;
  const Fused& f;
  unsigned char* memory;
  int key_head, b, each, begin, end;
  int row = int(threadIdx.x) / Rows::kChunks, chunk = int(threadIdx.x) % Rows::kChunks;
  // Factors of the stage in flight: loaded early, used once it has arrived.
  float by[kRows], decay[kRows], own = 0, own_decay = 1;

  __device__ SummedTokens(const Chunks& p, unsigned char* memory, int key_head)
      : p(p),
        f(p.f),
        memory(memory),
        key_head(key_head),
        b(key_head / f.G),
        each(of_queries ? f.H / f.G : 1),
        begin(int(blockIdx.y) * p.length),
        end(min(f.T, begin + p.length)) {}
  __device__ Rows tile(int i) const { return {shared_address(memory + i * kTileBytes)}; }
  __device__ float* column(int stage) const {
    return reinterpret_cast<float*>(memory + 4 * kTileBytes) + stage * kTokens;
  }
  __device__ bool has_factors() const { return of_queries || f.seen.keep || f.decay; }
  __device__ void copy(int stage, int r, int t0) {
    const View &x = of_queries ? f.q : f.k, &y = of_queries ? f.d_o : f.v;
    const int head = key_head % f.G * each + r, real = end - t0;
    copy_rows<kTokens, threads>(tile(2 * stage), row_of<T>(x, b, head, t0), x.row, real, f.D);
    copy_rows<kTokens, threads>(tile(2 * stage + 1), row_of<T>(y, b, head, t0), y.row, real, f.E);
    if (has_factors())
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int t = t0 + row + i * kStep;
        by[i] = token_factor<of_queries>(f, key_head, head, t, end).value;
        decay[i] = decay_to_boundary<of_queries>(f, key_head, t, begin, end);
      }
    if (threadIdx.x < kTokens) {
      const int t = t0 + int(threadIdx.x);
      own = token_factor<of_queries>(f, key_head, head, t, end).sum;
      own_decay = decay_to_boundary<of_queries>(f, key_head, t, begin, end);
    }
  }
  __device__ void apply_factors(int stage) const {
    if (has_factors())
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (row + i * kStep < kTokens)
          scale_chunk<T>(tile(2 * stage + 1).chunk(row + i * kStep, chunk), by[i] * decay[i]);
    if (threadIdx.x < kTokens) column(stage)[threadIdx.x] = own * own_decay;
  }
  // Calls add(x, y, factors in z) for every stage.
  template <class Add>
  __device__ void over(const Add& add) {
    copy(0, 0, begin);
    int stage = 0;
    for (int r = 0, t0 = begin; r < each; stage ^= 1) {
      cp_async_wait_all();
      apply_factors(stage);
      __syncthreads();  // these tokens have arrived; all warps are done with the last ones
      if ((t0 += kTokens) >= end) t0 = begin, ++r;
      if (r < each) copy(stage ^ 1, r, t0);
      add(tile(2 * stage), tile(2 * stage + 1), column(stage));
    }
  }
};

// Stores the sums of a tile of a chunk, or, past the last tile, of the constant.
template <class T>
__device__ inline void store_sums(const Chunks& p, const ChunkStates& to, int64_t record, int tile,
                                  const float (&S)[8][4], const float (&z)[4]) {
  const int64_t at = record * p.tiles() + tile;
  if (tile == p.tiles()) {
    float* const constant = to.constant + record * kConstantSums;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (lane() < 4)
        constant[8 * j + 2 * lane()] = S[j][0], constant[8 * j + 2 * lane() + 1] = S[j][1];
    if (lane() < 4) constant[64 + 2 * lane()] = z[0] + z[1], constant[65 + 2 * lane()] = 0;
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int feature = lane() / 4 + 8 * r;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      store_pair<T>(to.S, at * 1024 + feature * 64 + 8 * j + lane() % 4 * 2, S[j][2 * r],
                    S[j][2 * r + 1]);
    if (lane() % 4 == 0) p.sums[at * 16 + feature] = z[2 * r] + z[2 * r + 1];
  }
}

// Each warp owns `own` tiles of monomials. For float32.
template <int own, int warps>
struct SumsShape {
  static constexpr int kOwn = own, kWarps = warps, kThreads = 32 * warps;
};
template <class T, class Shape, bool of_queries>
__global__ __launch_bounds__(Shape::kThreads) void chunk_states_kernel(
    const __grid_constant__ Chunks p) {
  using M = Mma<T>;
  using Tokens = SummedTokens<T, Shape::kThreads, of_queries>;
  constexpr int kOwn = Shape::kOwn;
  extern __shared__ __align__(1024) unsigned char memory[];
  const int all = p.tiles() + 1, parts = (all + kOwn * Shape::kWarps - 1) / (kOwn * Shape::kWarps);
  const int key_head = int(blockIdx.x) / parts;
  const int first = (int(blockIdx.x) % parts * Shape::kWarps + warp()) * kOwn;
  Monomials m[kOwn];
#pragma unroll
  for (int o = 0; o < kOwn; ++o) m[o] = monomials(min(first + o, all - 2), all - 1, p.blocks());
  float S[kOwn][8][4] = {}, z[kOwn][4] = {};
  Tokens tokens(p, memory, key_head);
  tokens.over([&](Tile<T, 64> x, Tile<T, 64> y, const float* column) {
    const typename M::template BColumns<64> b_tile(y, 0, 0);
#pragma unroll
    for (int k = 0; k < Tokens::kTokens; k += M::kDepth) {
      typename M::B b_frag[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) b_frag[j] = b_tile.at(k, 16 * j);
      const auto ones = Features<T>::column(column + k);
#pragma unroll
      for (int o = 0; o < kOwn; ++o) {
        if (first + o >= all) break;
        const auto a_frag =
            first + o == all - 1 ? Features<T>::constant() : Features<T>::columns(x, k, m[o]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          M::template multiply<true>(S[o][2 * j], S[o][2 * j + 1], a_frag, b_frag[j]);
        Features<T>::add_column(z[o], a_frag, ones);
      }
    }
  });
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    if (first + o >= all) break;
    store_sums<T>(p, of_queries ? p.suffix : p.prefix, int64_t(key_head) * p.chunks() + blockIdx.y,
                  first + o, S[o], z[o]);
  }
}

// The same in bf16: each thread block owns one pair of blocks, each warp two x_i; one more thread
// block owns the channels themselves and the constant.
inline constexpr int kPairThreads = 8 * 32, kPairBlocks = 2;  // kPairBlocks: per SM
struct PairSums {
  using M = Mma<bf16>;
  using Rows = Tile<bf16, 64>;
  int first, second;  // blocks of i and j; or -1 and a block of channels
  bool constant;      // instead of channels
  float S[2][8][4], z[2][4];

  __device__ void add(int o, const M::A& a_frag, const M::B (&b_frag)[4], const M::B& ones) {
#pragma unroll
    for (int j = 0; j < 4; ++j) M::multiply<true>(S[o][2 * j], S[o][2 * j + 1], a_frag, b_frag[j]);
    Features<bf16>::add_column(z[o], a_frag, ones);
  }
  __device__ void add(Rows x, Rows y, const float* column) {
    const M::AColumns<64> seconds(x, 0, 16 * second), firsts(x, 0, 16 * max(first, 0));
    const M::BColumns<64> b_tile(y, 0, 0);
    const bool low = warp() < 4;
#pragma unroll
    for (int t = 0; t < 64; t += 16) {
      M::B b_frag[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) b_frag[j] = b_tile.at(t, 16 * j);
      const M::B ones = Features<bf16>::column(column + t);
      const M::A of_second = constant ? Features<bf16>::constant() : seconds.at(t, 0);
      if (first < 0) {
        add(0, of_second, b_frag, ones);
        continue;
      }
      const M::A of_first = firsts.at(t, 0);
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        const int from = (2 * warp() + o) % 8 * 4 + lane() % 4;
        const uint32_t x0 = __shfl_sync(~0u, low ? of_first.x[0] : of_first.x[1], from);
        const uint32_t x1 = __shfl_sync(~0u, low ? of_first.x[2] : of_first.x[3], from);
        M::A a_frag;
#pragma unroll
        for (int j = 0; j < 4; ++j) a_frag.x[j] = mul2(bf16(), of_second.x[j], j < 2 ? x0 : x1);
        add(o, a_frag, b_frag, ones);
      }
    }
  }
};

template <bool of_queries>
__global__ __launch_bounds__(kPairThreads, kPairBlocks) void chunk_pair_states_kernel(
    const __grid_constant__ Chunks p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const int tiles = p.tiles(), pairs = (tiles - p.blocks()) / 16, parts = pairs + 1;
  const int key_head = int(blockIdx.x) / parts, part = int(blockIdx.x) % parts;
  const bool is_pair = part < pairs, works = is_pair || warp() <= p.blocks();
  const Monomials m = monomials(16 * part, tiles, p.blocks());
  PairSums sums{};
  sums.first = is_pair ? m.i / 16 : -1, sums.second = is_pair ? m.block : min(warp(), 3);
  sums.constant = !is_pair && warp() == p.blocks();
  SummedTokens<bf16, kPairThreads, of_queries> tokens(p, memory, key_head);
  tokens.over([&](Tile<bf16, 64> x, Tile<bf16, 64> y, const float* column) {
    if (works) sums.add(x, y, column);
  });
  if (!works) return;
  const int first = is_pair ? 16 * part + 2 * warp() : sums.constant ? tiles : 16 * part + warp();
  const int64_t record = int64_t(key_head) * p.chunks() + blockIdx.y;
#pragma unroll
  for (int o = 0; o < 2; ++o)
    if (o == 0 || is_pair)
      store_sums<bf16>(p, of_queries ? p.suffix : p.prefix, record, first + o, sums.S[o],
                       sums.z[o]);
}

// Scan of states: load(record) reads n sums of a chunk, store(record, sums) writes the state before
// it, or after it if `backward`.
template <int n, bool backward, class Load, class Store>
__device__ inline void over_chunks(const Chunks& p, int key_head, const Load& load,
                                   const Store& store) {
  constexpr int kBatch = 16;
  const int chunks = p.chunks();
  const auto record = [&](int c) {
    return int64_t(key_head) * chunks + (backward ? chunks - 1 - c : c);
  };
  Vec<n> sum{};
  for (int c0 = 0; c0 < chunks; c0 += kBatch) {
    Vec<n> x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) x[i] = load(record(min(c0 + i, chunks - 1)));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (c0 + i >= chunks) return;
      store(record(c0 + i), sum);
      if (p.f.decay) {
        const int first = int(record(c0 + i) - record(0) + (backward ? chunks - 1 : 0)) * p.length;
        const int last = min(p.f.S, first + p.length) - 1;
        sum = sum * decay_factor(gates_to(p.f, key_head, last), gates_to(p.f, key_head, first - 1));
      }
      sum = sum + x[i];
    }
  }
}

// Four consecutive elements of S, which the scan turns from chunk sums into states in place.
template <class T>
struct Vector4;
template <>
struct Vector4<bf16> {
  static __device__ Vec<4> load(const void* S, int64_t at) {
    const uint2 y = *reinterpret_cast<const uint2*>(static_cast<const bf16*>(S) + at);
    const float2 a = unpack2(y.x), b = unpack2(y.y);
    return {a.x, a.y, b.x, b.y};
  }
  static __device__ void store(void* S, int64_t at, const Vec<4>& y) {
    *reinterpret_cast<uint2*>(static_cast<bf16*>(S) + at) = {pack2(bf16(), y[0], y[1]),
                                                             pack2(bf16(), y[2], y[3])};
  }
};
template <>
struct Vector4<float> {
  static __device__ Vec<4> load(const void* S, int64_t at) {
    const float4 y = *reinterpret_cast<const float4*>(static_cast<const float*>(S) + at);
    return {y.x, y.y, y.z, y.w};
  }
  static __device__ void store(void* S, int64_t at, const Vec<4>& y) {
    *reinterpret_cast<float4*>(static_cast<float*>(S) + at) = {y[0], y[1], y[2], y[3]};
  }
};

inline constexpr int kScanThreads = 128;
inline int64_t scan_parts(const Chunks& p) {  // threads per key head
  return int64_t(p.tiles()) * (256 + 8) + kConstantSums / 2;
}
template <class T, bool backward>
__global__ __launch_bounds__(kScanThreads) void chunk_scan_kernel(
    const __grid_constant__ Chunks p) {
  const ChunkStates& to = backward ? p.suffix : p.prefix;
  const int tiles = p.tiles(), key_head = int(blockIdx.y);
  const auto by = [&](int u) {
    return coefficient(p.w, p.f.scale, monomials(u, tiles, p.blocks()));
  };
  int at = int(blockIdx.x) * kScanThreads + int(threadIdx.x);
  if (at < 256 * tiles) {
    const float unit = by(at / 256);
    const auto place = [&](int64_t record) { return record * tiles * 1024 + 4 * at; };
    return over_chunks<4, backward>(
        p, key_head, [&](int64_t record) { return Vector4<T>::load(to.S, place(record)); },
        [&](int64_t record, const Vec<4>& y) { Vector4<T>::store(to.S, place(record), y * unit); });
  }
  if ((at -= 256 * tiles) < 8 * tiles) {
    const float unit = by(at / 8);
    return over_chunks<2, backward>(
        p, key_head,
        [&](int64_t record) -> Vec<2> {
          const float* const y = p.sums + record * tiles * 16 + 2 * at;
          return {y[0], y[1]};
        },
        [&](int64_t record, const Vec<2>& y) {
          Features<T>::store_column(to.z + (record * tiles + at / 8) * kTileColumn, 2 * at % 16,
                                    y[0] * unit, y[1] * unit);
        });
  }
  if ((at -= 8 * tiles) < kConstantSums / 2)
    over_chunks<2, backward>(
        p, key_head,
        [&](int64_t record) -> Vec<2> {
          const float* const y = to.constant + record * kConstantSums + 2 * at;
          return {y[0], y[1]};
        },
        [&](int64_t record, const Vec<2>& y) {
          float* const place = to.constant + record * kConstantSums + 2 * at;
          place[0] = y[0] * p.w.c[0], place[1] = y[1] * p.w.c[0];
        });
}

// Two elements of a stored column z (Features::store_column), in global memory.
__device__ inline float2 column_pair(bf16, const uint32_t* z, int feature) {
  const float2 high = unpack2(z[feature / 2]), low = unpack2(z[8 + feature / 2]);
  return {high.x + low.x, high.y + low.y};
}
__device__ inline float2 column_pair(float, const uint32_t* z, int feature) {
  return {__uint_as_float(z[feature]), __uint_as_float(z[feature + 1])};
}

// d_after of each chunk but the last: the keys' state before the next chunk times the queries'
// state after this one. Both contain the coefficients of the weight, which counts once.
inline constexpr int kCrossingThreads = 256;
template <class T>
__global__ __launch_bounds__(kCrossingThreads) void chunk_crossings_kernel(
    const __grid_constant__ Chunks p) {
  const int tiles = p.tiles(), n = int(threadIdx.x);
  const int64_t here = int64_t(blockIdx.x) * p.chunks() + blockIdx.y, next = here + 1;
  double sum = 0;
  for (int u = 0; u < tiles; ++u) {
    const float unit = coefficient(p.w, p.f.scale, monomials(u, tiles, p.blocks()));
    if (unit == 0) continue;
    const Vec<4> product = Vector4<T>::load(p.prefix.S, (next * tiles + u) * 1024 + 4 * n) *
                           Vector4<T>::load(p.suffix.S, (here * tiles + u) * 1024 + 4 * n);
    float of_tile = (product[0] + product[1]) + (product[2] + product[3]);
    if (n < 8) {
      const float2 z = column_pair(T(), p.prefix.z + (next * tiles + u) * kTileColumn, 2 * n);
      const float2 y = column_pair(T(), p.suffix.z + (here * tiles + u) * kTileColumn, 2 * n);
      of_tile += z.x * y.x + z.y * y.y;
    }
    sum += double(of_tile) / unit;
  }
  if (n <= 64 && p.w.c[0] != 0)
    sum += double(p.prefix.constant[next * kConstantSums + n]) *
           p.suffix.constant[here * kConstantSums + n] / p.w.c[0];
  __shared__ double of_warps[kCrossingThreads / 32];
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane() == 0) of_warps[warp()] = sum;
  __syncthreads();
  if (n != 0) return;
  for (int w = 1; w < kCrossingThreads / 32; ++w) sum += of_warps[w];
  p.d_after[here] = sum;
}

}  // namespace horner::attn::kernels::cuda

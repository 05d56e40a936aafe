// Order 1, bf16: a chunk in shared memory, its tokens and the states before and after it.
#pragma once

#include "attn/kernels/cuda/chunked/features.cuh"

namespace horner::attn::kernels::cuda {

// Shared memory: tiles of tokens, states S, columns z, order-0 sums, query factors, gates.
template <int tiles, int states, int blocks, bool decay>
struct LinearChunkShape {
  static constexpr int kTokens = kChunkUnit, kWarps = kTokens / 16, kThreads = 32 * kWarps;
  static constexpr int kBlocks = blocks, kTile = kTokens * 128, kState = 64 * 128;
  static constexpr int kStatesAt = tiles * kTile, kColumn = 4 * 4 * kTileColumn;
  static constexpr int kColumnsAt = kStatesAt + states * kState;
  static constexpr int kConstantsAt = kColumnsAt + states * kColumn;
  static constexpr int kFactorsAt = kConstantsAt + states * 4 * kConstantSums;
  static constexpr int kGatesAt = kFactorsAt + kTokens * 16;
  static constexpr int kBytes = kGatesAt + (decay ? kTokens * 4 : 0);
  // For RunningSums.
  static constexpr bool kDecay = decay, kRaw = false;
  static constexpr int kAtoms = 1, kKeys = 16;
};

// Per query: a w = by q.k + constant, dx = by g.v + dW; order 0 of w has gradient constant g.v +
// constant_dW.
struct QueryFactors {
  float by, constant, dW, constant_dW;
};

template <class Shape>
struct LinearChunkTiles {
  using Rows = Tile<bf16, 64>;
  static constexpr int kTokens = Shape::kTokens, kThreads = Shape::kThreads;

  const Chunks& p;
  const Fused& f;
  unsigned char* memory;
  int key_head, b, g, chunk, first, own;  // first token of the chunk; of the warp, in it

  __device__ LinearChunkTiles(const Chunks& p, unsigned char* memory, int key_head)
      : p(p),
        f(p.f),
        memory(memory),
        key_head(key_head),
        b(key_head / f.G),
        g(key_head % f.G),
        chunk(int(blockIdx.y)),
        first(chunk * kTokens),
        own(warp() * 16) {}
  __device__ Rows tile(int i) const { return {shared_address(memory + i * Shape::kTile)}; }
  __device__ Rows state(int i) const {
    return {shared_address(memory + Shape::kStatesAt + i * Shape::kState)};
  }
  __device__ Rows q() const { return tile(0); }
  __device__ Rows k() const { return tile(1); }
  __device__ Rows v() const { return tile(2); }
  __device__ Rows d_o() const { return tile(3); }
  __device__ bool is_first() const { return chunk == 0; }
  __device__ bool is_last() const { return chunk + 1 == p.chunks(); }
  __device__ float unit() const { return p.w.c[1] * f.scale; }
  // z of a block of sixteen channels, and the order-0 sums.
  __device__ uint32_t column(int i, int block) const {
    return shared_address(memory + Shape::kColumnsAt + i * Shape::kColumn) +
           uint32_t(block * 4 * kTileColumn);
  }
  __device__ float* constant(int i) const {
    return reinterpret_cast<float*>(memory + Shape::kConstantsAt) + i * kConstantSums;
  }

  // A state being loaded: its sums since the segment's boundary, and the state at that boundary.
  static constexpr int kParts = 64 * 8 / kThreads;
  struct Loads {
    uint4 local[kParts];
    float4 segment_sum[kParts][2];
    float2 z[2];
    float constant[2];
    float decay;  // factor on segment_sum, z[1], constant[1]
  };
  __device__ Loads load_state(const ChunkStates& from, bool suffix) const {
    const int tiles = p.tiles(), n = int(threadIdx.x);
    const int64_t record = int64_t(key_head) * p.chunks() + chunk;
    const float* const segment =
        from.segments +
        (int64_t(key_head) * p.segments() + chunk / p.segment) * (tiles + 1) * kTileSums;
    const bf16* const S = static_cast<const bf16*>(from.S) + record * tiles * 1024;
    Loads x{};
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int at = n + i * kThreads, row = at / 8;
      if (row >= 16 * tiles) continue;
      const float* const segment_sum = segment + row / 16 * kTileSums + row % 16 * 64 + at % 8 * 8;
      x.local[i] = *reinterpret_cast<const uint4*>(S + 8 * at);
      x.segment_sum[i][0] = *reinterpret_cast<const float4*>(segment_sum);
      x.segment_sum[i][1] = *reinterpret_cast<const float4*>(segment_sum + 4);
    }
    if (n < 8 * tiles) {
      const float* const z = reinterpret_cast<const float*>(from.z) + record * tiles * 16;
      x.z[0] = *reinterpret_cast<const float2*>(z + 2 * n);
      x.z[1] = *reinterpret_cast<const float2*>(segment + n / 8 * kTileSums + 1024 + 2 * n % 16);
    }
    if (n <= 64 && p.w.c[0] != 0) {
      x.constant[0] = from.constant[record * kConstantSums + n];
      x.constant[1] = segment[tiles * kTileSums + (n < 64 ? n : 1024)];
    }
    if constexpr (Shape::kDecay) {
      const int length = p.segment * kTokens, begin = chunk / p.segment * length;
      const int to = suffix ? min(f.S, begin + length) - 1 : first - 1;
      x.decay = decay_factor(gates_to(f, key_head, to),
                             gates_to(f, key_head, suffix ? last() : begin - 1));
    }
    return x;
  }
  __device__ int last() const { return min(f.S, first + kTokens) - 1; }  // last token

  // Running sums of the log gates within the chunk, in units of ln 2.
  __device__ float* gates() const { return reinterpret_cast<float*>(memory + Shape::kGatesAt); }
  __device__ void load_gates() const {
    if (const int n = int(threadIdx.x); Shape::kDecay && n < kTokens)
      gates()[n] = float(
          (gates_to(f, key_head, min(first + n, f.S - 1)) - gates_to(f, key_head, first - 1)) *
          double(kLog2e));
  }
  // Sums of both parts: eight elements of S, two of z, one of order 0.
  static __device__ Vec<8> sums_of(const Loads& x, int j) {
    const float decay = Shape::kDecay ? x.decay : 1;
    const uint4& local = x.local[j];
    const float2 y[4] = {unpack2(local.x), unpack2(local.y), unpack2(local.z), unpack2(local.w)};
    const float4 &a = x.segment_sum[j][0], &b = x.segment_sum[j][1];
    return {y[0].x + a.x * decay, y[0].y + a.y * decay, y[1].x + a.z * decay, y[1].y + a.w * decay,
            y[2].x + b.x * decay, y[2].y + b.y * decay, y[3].x + b.z * decay, y[3].y + b.w * decay};
  }
  static __device__ float2 column_of(const Loads& x) {
    const float decay = Shape::kDecay ? x.decay : 1;
    return {x.z[0].x + x.z[1].x * decay, x.z[0].y + x.z[1].y * decay};
  }
  static __device__ float constant_of(const Loads& x) {
    return x.constant[0] + x.constant[1] * (Shape::kDecay ? x.decay : 1);
  }
  // Stores these, times the coefficients of the weight.
  __device__ void store_state(int i, const Loads& x) const {
    const int n = int(threadIdx.x);
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const int at = n + j * kThreads;
      const Vec<8> y = sums_of(x, j) * unit();
      *static_cast<uint4*>(__cvta_shared_to_generic(state(i).chunk(at / 8, at % 8))) = {
          pack2(bf16(), y[0], y[1]), pack2(bf16(), y[2], y[3]), pack2(bf16(), y[4], y[5]),
          pack2(bf16(), y[6], y[7])};
    }
    const float2 z = column_of(x);
    if (n < 32)
      Features<bf16>::store_column(
          static_cast<uint32_t*>(__cvta_shared_to_generic(column(i, n / 8))), 2 * n % 16,
          z.x * unit(), z.y * unit());
    if (n <= 64) constant(i)[n] = constant_of(x) * p.w.c[0];
  }
  // This thread's part of the weights times their gradients, summed over the keys before the chunk
  // and the queries after it.
  __device__ float crossing(const Loads& prefix, const Loads& suffix) const {
    const float2 z = column_of(prefix), y = column_of(suffix);
    float sum = z.x * y.x + z.y * y.y;
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      const Vec<8> products = sums_of(prefix, j) * sums_of(suffix, j);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += products[i];
    }
    return (sum * unit() + constant_of(prefix) * constant_of(suffix) * p.w.c[0]) *
           decay_factor(gates_to(f, key_head, last()), gates_to(f, key_head, first - 1));
  }
  __device__ void copy_keys() const {
    copy_rows<kTokens, kThreads>(k(), row_of<bf16>(f.k, b, g, first), f.k.row, f.S - first, f.D);
    copy_rows<kTokens, kThreads>(v(), row_of<bf16>(f.v, b, g, first), f.v.row, f.S - first, f.E);
  }
  __device__ void copy_queries(Rows to, const View& x, int head, int channels) const {
    copy_rows<kTokens, kThreads>(to, row_of<bf16>(x, b, head, first), x.row, f.T - first, channels);
  }
  // Each thread handles what it copied itself: no barrier needed.
  __device__ void rectify(Rows x) const {
    if (!p.relu) return;
#pragma unroll
    for (int at = int(threadIdx.x); at < 8 * kTokens; at += kThreads) {
      uint4& y = *static_cast<uint4*>(__cvta_shared_to_generic(x.chunk(at / 8, at % 8)));
      y = {relu(y.x), relu(y.y), relu(y.z), relu(y.w)};
    }
  }
  __device__ QueryFactors* factors() const {
    return reinterpret_cast<QueryFactors*>(memory + Shape::kFactorsAt);
  }
  __device__ void load_factors(int head) const {
    const int real = f.T - first, n = int(threadIdx.x);
    if (n >= kTokens) return;
    Query query = f.queries[int64_t(b * f.H + head) * f.T + first + (n < real ? n : 0)];
    if (n >= real) query.a = query.dW = 0;
    factors()[n] = {query.a * unit(), query.a * p.w.c[0], query.dW * unit(), query.dW * p.w.c[0]};
  }
  __device__ bool is_kept(int s) const {
    return !f.seen.keep || (s < f.S && f.seen.keep[int64_t(b) * f.S + s]);
  }
  // Zeroes masked keys: they add nothing to dq.
  __device__ void hide_keys() const {
    for (int at = int(threadIdx.x); at < 8 * kTokens; at += kThreads)
      if (!is_kept(first + at / 8))
        *static_cast<uint4*>(__cvta_shared_to_generic(k().chunk(at / 8, at % 8))) = uint4{};
  }
  __device__ float2 column_pair(int i, int j) const {
    return Features<bf16>::stored_pair(column(i, j / 2), j % 2 * 8 + lane() % 4 * 2);
  }
};

}  // namespace horner::attn::kernels::cuda

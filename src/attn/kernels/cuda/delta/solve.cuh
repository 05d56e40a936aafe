// What a chunk's keys, values and queries give without the state: triangular systems of 64 tokens,
// solved by substitution over blocks of 16. Matrices are transposed, channels by tokens, so that a
// solved block is an operand of the next.
#pragma once

#include "attn/kernels/cuda/delta/decayed.cuh"

namespace horner::attn::kernels::cuda::delta {

// Shared memory of both kernels.
template <int C, int tiles>
struct SolveShape {
  static constexpr int kTile = kTokens * C * 2, kPairs = kTokens * kTokens * 2;
  static constexpr int kPairsAt = tiles * kTile;           // the system; queries by keys
  static constexpr int kBlocksAt = kPairsAt + 2 * kPairs;  // [4, 16, 20] floats
  static constexpr int kNumbersAt = kBlocksAt + kBlocks * 16 * 20 * 4;  // share, sums, factors
  static constexpr int kReferencesAt = kNumbersAt + 4 * kTokens * 4;
  static constexpr int kBytes = kReferencesAt + (kBlocks + 1) * C * 4;
};

// From the products of the keys, 16 rows of each warp: A = L share below the diagonal blocks,
// (1 + A)^-1 - 1 in them.
__device__ inline void put_system(const Fragments& products, Pairs system, float (*block)[16][20],
                                  const float* share, const float* sums, float scale, bool gated) {
  const int own = 16 * warp();
  float(*mine)[20] = block[warp()];
  const M::Writer<kTokens> writer(system, own);
#pragma unroll
  for (int j = 0; j < kTokens / 8; j += 2) {
    float x[2][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int i = n % 4, r = own + row_in(i), s = 8 * (j + n / 4) + column_in(i);
      float y = r > s ? scale * products[j + n / 4][i] * share[s] : 0;
      if (gated && r > s) y *= __expf(sums[r] - sums[s]);
      x[n / 4][i] = y;
      if (8 * j == own) mine[row_in(i)][8 * (n / 4) + column_in(i)] = y;
    }
    const M::Rounded two[2] = {M::rounded(x[0]), M::rounded(x[1])};
    writer.put(0, 8 * j, two);
  }
  __syncwarp();
  float x[16];  // a column of the inverse
  const int c = lane() % 16;
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    float y = r == c ? 1 : 0;
#pragma unroll
    for (int s = 0; s < r; ++s) y -= mine[r][s] * x[s];
    x[r] = y;
  }
  __syncwarp();
  if (lane() < 16)
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const bf16 y = bf16(r > c ? x[r] : 0.f);
      const uint16_t bits = *reinterpret_cast<const uint16_t*>(&y);
      asm volatile("st.shared.b16 [%0], %1;\n" ::"r"(system.element(own + r, own + c)), "h"(bits)
                   : "memory");
    }
}

// x [16, 64 tokens] := x ((1 + A)^-1)^T, or without the transpose.
template <bool transposed>
__device__ inline void solve(Fragments& x, Pairs system) {
  constexpr int kBlocks = kTokens / 16;
  const M::BRows<kTokens> rows(system, 0);
  const M::BColumns<kTokens> columns(system, 0, 0);
  const auto block = [&](int r, int c) {  // as B [16 of k, 16 of n]
    return transposed ? rows.at(16 * r, 16 * c) : columns.at(16 * r, 16 * c);
  };
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const int i = transposed ? n : kBlocks - 1 - n;
    const M::A a = M::to_a_operand(x, i);
    M::multiply<true>(x[2 * i], x[2 * i + 1], a, block(i, i));
    M::A solved = M::to_a_operand(x, i);
#pragma unroll
    for (int k = 0; k < 4; ++k) solved.x[k] ^= 0x80008000u;
#pragma unroll
    for (int m = n + 1; m < kBlocks; ++m) {
      const int j = transposed ? m : kBlocks - 1 - m;
      M::multiply<true>(x[2 * j], x[2 * j + 1], solved, transposed ? block(j, i) : block(i, j));
    }
  }
}

// Rows [16 m, ..) of a transposed tile, times a factor of each token.
template <int C>
__device__ inline void load_transposed(Fragments& x, Rows<C> tile, int channel, const float* by) {
  const M::AColumns<C> columns(tile, 0, channel);
#pragma unroll
  for (int k = 0; k < kTokens / 16; ++k) unpack(columns.at(16 * k, 0), x[2 * k], x[2 * k + 1]);
  if (by) scale_columns(x, by);
}

__device__ inline void store_transposed(const Fragments& x, bf16* rows, bool negative) {
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t two = pack2(bf16(), x[j][i], x[j][i + 1]) ^ (negative ? 0x80008000u : 0);
      *reinterpret_cast<uint32_t*>(rows + row_in(i) * kTokens + 8 * j + column_in(0)) = two;
    }
}
template <int C>
__device__ inline float4* fragments_of(float* all, int64_t record, int rows) {
  return reinterpret_cast<float4*>(all) + (record * (C / 16) + rows) * (kTokens / 8) * 32 + lane();
}
template <int C>
__device__ inline void store_fragments(const Fragments& x, float* all, int64_t record, int rows) {
  float4* to = fragments_of<C>(all, record, rows);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) to[32 * j] = {x[j][0], x[j][1], x[j][2], x[j][3]};
}

// scale k.k of the warp's rows, in the order of its lanes.
template <int C>
__device__ inline float own_product(const Chunk& c, const View& k, int row) {
  float sum = 0;
  if (row < c.real)
    for (int d = lane() % 2 * 8; d < C; d += 16) {
      const uint4 x = *reinterpret_cast<const uint4*>(c.rows(k) + row * k.row + d);
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = unpack2(bf16(), words[i]);
        sum += two.x * two.x + two.y * two.y;
      }
    }
  return sum + __shfl_xor_sync(~0u, sum, 1);
}

template <int C, bool channels>
__global__ void __launch_bounds__(kThreads) solve_forward(DeltaChunks p) {
  using Shape = SolveShape<C, channels ? 4 : 2>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Chunk c(p, blockIdx.x);
  const auto tile = [&](int i) { return Rows<C>{shared_address(memory + i * Shape::kTile)}; };
  const Rows<C> k = tile(0), v = tile(1);  // k: with channels, from the start of the chunk
  const Pairs system{shared_address(memory + Shape::kPairsAt)};
  const auto block = reinterpret_cast<float(*)[16][20]>(memory + Shape::kBlocksAt);
  float* share = reinterpret_cast<float*>(memory + Shape::kNumbersAt);
  float *sums = share + kTokens, *key_factor = sums + kTokens;
  const References<C> refs{reinterpret_cast<float(*)[C]>(memory + Shape::kReferencesAt)};
  const float* channel_sums = p.channel_sums + c.record * kTokens * C;
  c.copy(v, p.v);
  if constexpr (channels) {
    copy_matrix<kTokens>(k, at(p.k_from_start, c.record, kTokens * C));
    refs.load(channel_sums);
    __syncthreads();
    put_decayed(tile(2), c, p.k, channel_sums, refs, false);
    put_decayed(tile(3), c, p.k, channel_sums, refs, true);
  } else {
    c.copy(k, p.k);
  }
  if (warp() == 0) {
    float2 b{0, 0};
    if (p.logs) {
      const auto log = [&](int i) {
        constexpr float kLeast = -100;  // e^-100 is 0 in float32
        return i < c.real ? fmaxf(p.logs[c.token(p, i)], kLeast) : 0;
      };
      b = running_sums(log(2 * lane()), log(2 * lane() + 1));
    }
    reinterpret_cast<float2*>(sums)[lane()] = b;
  }
  cp_async_wait_all();
  __syncthreads();

  {
    const int r = 16 * warp() + lane() / 2;
    constexpr float kTiny = 1e-6f;
    const float own = p.scale * own_product<C>(c, p.k, r);
    const bool is_real = r < c.real && fabsf(own) >= kTiny;
    const float mine = is_real ? p.most * p.beta[c.token(p, r)] / own : 0;
    const float b = sums[r], last = sums[kTokens - 1];
    const int64_t to = c.record * kTokens + r;
    if (lane() % 2 == 0) {
      share[r] = mine, key_factor[r] = p.scale * __expf(b);
      p.share[to] = mine, p.own[to] = is_real ? own : 0, p.sums[to] = b;
      p.factor[to] = mine * __expf(last - b);
      if (r == 0 && !channels) p.left[c.record] = __expf(last);
    }
  }
  float products[1][kTokens / 8][4];
  if constexpr (channels)
    decayed_products(products[0], tile(2), tile(3), refs,
                     GivenRows<C>(c, p.k, p.k, channel_sums, warp()), refs.is_mild(warp()));
  else
    mma_abt<bf16>(products, k, 16 * warp(), k, 0);
  __syncthreads();
  put_system(products[0], system, block, share, sums, p.scale, p.logs != nullptr);
  __syncthreads();
#pragma unroll 1
  for (int m = warp(); m < 2 * C / 16; m += kWarps) {
    const bool of_values = m >= C / 16;
    const int rows = of_values ? m - C / 16 : m;
    Fragments x;
    load_transposed(x, of_values ? v : k, 16 * rows, of_values || channels ? nullptr : key_factor);
    solve<true>(x, system);
    if (of_values)
      store_fragments<C>(x, p.given, c.record, rows);
    else
      store_transposed(x, at(p.taken, c.record, C * kTokens) + 16 * rows * kTokens, true);
  }
}

template <int C, bool channels>
__global__ void __launch_bounds__(kThreads) solve_backward(DeltaChunks p) {
  using Shape = SolveShape<C, channels ? 6 : 3>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Chunk c(p, blockIdx.x);
  const auto tile = [&](int i) { return Rows<C>{shared_address(memory + i * Shape::kTile)}; };
  // With channels: q from the start of the chunk, k to its end.
  const Rows<C> q = tile(0), k = tile(1), dN = tile(2);
  const Pairs system{shared_address(memory + Shape::kPairsAt)};
  const Pairs weights{shared_address(memory + Shape::kPairsAt + Shape::kPairs)};
  const auto block = reinterpret_cast<float(*)[16][20]>(memory + Shape::kBlocksAt);
  float* share = reinterpret_cast<float*>(memory + Shape::kNumbersAt);
  float *sums = share + kTokens, *key_factor = sums + kTokens, *query_factor = key_factor + kTokens;
  const References<C> refs{reinterpret_cast<float(*)[C]>(memory + Shape::kReferencesAt)};
  const float* channel_sums = p.channel_sums + c.record * kTokens * C;
  c.copy(dN, p.dN);
  if constexpr (channels) {
    copy_matrix<kTokens>(q, at(p.q_from_start, c.record, kTokens * C));
    copy_matrix<kTokens>(k, at(p.k_to_end, c.record, kTokens * C));
    refs.load(channel_sums);
    __syncthreads();
    put_decayed(tile(3), c, p.q, channel_sums, refs, false);
    put_decayed(tile(4), c, p.k, channel_sums, refs, false);
    put_decayed(tile(5), c, p.k, channel_sums, refs, true);
  } else {
    c.copy(q, p.q), c.copy(k, p.k);
  }
  const int64_t tokens = c.record * kTokens;
  if (const int i = int(threadIdx.x); i < kTokens) {
    const float b = p.sums[tokens + i], by = p.scale * __expf(b);
    share[i] = p.share[tokens + i], sums[i] = b;
    key_factor[i] = p.factor[tokens + i], query_factor[i] = by;
    p.d_factor[tokens + i] = channels ? -1 : -by;
  }
  cp_async_wait_all();
  __syncthreads();

  const int own = 16 * warp();
  const bool gated = p.logs != nullptr;
  float products[1][kTokens / 8][4];
  const bool mild = channels && refs.is_mild(warp());
  if constexpr (channels)
    decayed_products(products[0], tile(3), tile(5), refs,
                     GivenRows<C>(c, p.q, p.k, channel_sums, warp()), mild);
  else
    mma_abt<bf16>(products, q, own, k, 0);
  const M::Writer<kTokens> writer(weights, own);
#pragma unroll
  for (int j = 0; j < kTokens / 8; j += 2) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int i = n % 4, r = own + row_in(i), s = 8 * (j + n / 4) + column_in(i);
      float y = r >= s ? p.scale * products[0][j + n / 4][i] : 0;
      if (gated && r >= s) y *= __expf(sums[r] - sums[s]);
      products[0][j + n / 4][i] = y;
    }
    const M::Rounded two[2] = {M::rounded(products[0][j]), M::rounded(products[0][j + 1])};
    writer.put(0, 8 * j, two);
  }
  if constexpr (channels)
    decayed_products(products[0], tile(4), tile(5), refs,
                     GivenRows<C>(c, p.k, p.k, channel_sums, warp()), mild);
  else
    mma_abt<bf16>(products, k, own, k, 0);
  put_system(products[0], system, block, share, sums, p.scale, gated);
  __syncthreads();
#pragma unroll 1
  for (int m = warp(); m < 2 * C / 16; m += kWarps) {
    const bool of_values = m >= C / 16;
    const int rows = of_values ? m - C / 16 : m;
    Fragments x = {};
    if (!of_values) {
      load_transposed(x, k, 16 * rows, key_factor);
      solve<false>(x, system);
      store_transposed(x, at(p.d_taken, c.record, C * kTokens) + 16 * rows * kTokens, false);
      continue;
    }
    const M::AColumns<C> columns(dN, 0, 16 * rows);
    const M::BColumns<kTokens> of_weights(weights, 0, 0);
    M::A a[kTokens / 16];
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) a[i] = columns.at(16 * i, 0);
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i)
#pragma unroll
      for (int j = 0; j <= i; ++j)
        M::multiply<true>(x[2 * j], x[2 * j + 1], a[i], of_weights.at(16 * i, 16 * j));
    scale_columns(x, share);
    solve<false>(x, system);
    store_fragments<C>(x, p.d_given, c.record, rows);
    // dN^T (scale e^b q): what the queries add to dS, transposed.
    if (gated)
#pragma unroll
      for (int i = 0; i < kTokens / 16; ++i) {
        float y[2][4];
        unpack(a[i], y[0], y[1]);
        scale_columns(y, query_factor + 16 * i);
        a[i] = M::to_a_operand(y, 0);
      }
    const M::BColumns<C> of_queries(q, 0, 0);
    uint4* to =
        static_cast<uint4*>(p.d_state) + (c.record * (C / 16) + rows) * (C / 16) * 32 + lane();
    const float by = gated || channels ? 1 : p.scale;
#pragma unroll
    for (int d = 0; d < C / 16; ++d) {
      float y[2][4] = {};
#pragma unroll
      for (int i = 0; i < kTokens / 16; ++i)
        M::multiply<true>(y[0], y[1], a[i], of_queries.at(16 * i, 16 * d));
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = pack2(bf16(), by * y[i / 2][i % 2 * 2], by * y[i / 2][i % 2 * 2 + 1]);
      to[32 * d] = {words[0], words[1], words[2], words[3]};
    }
  }
}

}  // namespace horner::attn::kernels::cuda::delta

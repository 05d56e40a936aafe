// Products of queries and keys whose channels decay each at its own rate, over blocks of 16 tokens.
// Only differences of the running sums b of the log gates are taken to exp. With r_I the sum before
// block I, a query of block I and a key of block J <= I:
//   e^(b_i - b_j) = e^(b_i - r_I) e^(r_I - r_(J+1)) e^(r_(J+1) - b_j)
// The first and the last factor are at most 1 and are part of the tiles; so is the middle one, but
// for I = J, where it is the inverse of the decay over a block. Blocks in which that is too large
// sum their pairs one by one.
#pragma once

#include "attn/kernels/cuda/common/epilogue.cuh"
#include "attn/kernels/cuda/delta/tiles.cuh"

namespace horner::attn::kernels::cuda::delta {

inline constexpr int kBlocks = kTokens / 16;

// e^b between the blocks: r_0 = 0, .., r_4, as numbers in shared memory.
template <int C>
struct References {
  float (*r)[C];  // [kBlocks + 1]

  __device__ void load(const float* sums) const {
    for (int i = int(threadIdx.x); i < (kBlocks + 1) * C; i += kThreads)
      r[i / C][i % C] = i < C ? 0 : sums[(i / C * 16 - 1) * C + i % C];
  }
  // The middle factor, of a lane's two columns of eight.
  __device__ float2 between(int query_block, int key_block, int column) const {
    const float2 x = *reinterpret_cast<const float2*>(&r[query_block][column]);
    const float2 y = *reinterpret_cast<const float2*>(&r[key_block + 1][column]);
    return {__expf(x.x - y.x), __expf(x.y - y.y)};
  }
  // e^(b - r) of a row in a block
  __device__ float2 from(int block, const float* sums, int row, int column) const {
    const float2 x = *reinterpret_cast<const float2*>(sums + row * C + column);
    const float2 y = *reinterpret_cast<const float2*>(&r[block][column]);
    return {__expf(x.x - y.x), __expf(x.y - y.y)};
  }
  __device__ float2 of(int block, int column) const {  // e^r
    const float2 x = *reinterpret_cast<const float2*>(&r[block][column]);
    return {__expf(x.x), __expf(x.y)};
  }
  // Whether e^(r_I - r_(I+1)) stays far below the largest float, in every channel.
  __device__ bool is_mild(int block) const {
    constexpr float kMost = 60;
    bool mild = true;
    for (int c = lane(); c < C; c += 32) mild &= r[block][c] - r[block + 1][c] < kMost;
    return __all_sync(~0u, mild);
  }
};

__device__ inline void store_chunk(uint32_t at, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}

// x e^(b - r_I) for queries, x e^(r_(I+1) - b) for keys; what rounding takes from it to `low`,
// unless that is null.
template <int C>
__device__ inline void put_decayed(Rows<C> to, const Chunk& c, const View& from, const float* sums,
                                   const References<C>& refs, bool of_keys,
                                   const Rows<C>* low = nullptr) {
  const bf16* rows = c.rows(from);
  for (int i = int(threadIdx.x); i < kTokens * C / 8; i += kThreads) {
    const int row = i / (C / 8), at = i % (C / 8) * 8;
    uint4 x{0, 0, 0, 0};
    if (row < c.real) x = *reinterpret_cast<const uint4*>(rows + row * from.row + at);
    uint32_t words[4] = {x.x, x.y, x.z, x.w}, left[4];
    const float* r = refs.r[row / 16 + of_keys] + at;
    const float* b = sums + row * C + at;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 two = unpack2(bf16(), words[n]);
      const float2 now = *reinterpret_cast<const float2*>(b + 2 * n);
      const float sign = of_keys ? -1 : 1;
      const float y = two.x * __expf(sign * (now.x - r[2 * n]));
      const float z = two.y * __expf(sign * (now.y - r[2 * n + 1]));
      words[n] = pack2(bf16(), y, z);
      const float2 rounded = unpack2(bf16(), words[n]);
      left[n] = pack2(bf16(), y - rounded.x, z - rounded.y);
    }
    store_chunk(to.chunk(row, at / 8), {words[0], words[1], words[2], words[3]});
    if (low) store_chunk(low->chunk(row, at / 8), {left[0], left[1], left[2], left[3]});
  }
}

__device__ inline M::A scaled(const M::A& a, float2 low, float2 high) {
  float x[2][4];
  unpack(a, x[0], x[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[0][i] *= i % 2 ? low.y : low.x, x[1][i] *= i % 2 ? high.y : high.x;
  return M::to_a_operand(x, 0);
}

// Rows of queries and keys as they were given, for the pairs of one block.
template <int C>
struct GivenRows {
  const bf16 *x, *k;
  int64_t x_row, k_row;
  const float* sums;
  int first, real;  // of the block

  __device__ GivenRows(const Chunk& c, const View& queries, const View& keys, const float* sums,
                       int block)
      : x(c.rows(queries)),
        k(c.rows(keys)),
        x_row(queries.row),
        k_row(keys.row),
        sums(sums),
        first(16 * block),
        real(c.real) {}
  __device__ float2 query(int i, int d) const { return pair(x + i * x_row, i, d); }
  __device__ float2 key(int i, int d) const { return pair(k + i * k_row, i, d); }
  __device__ float2 pair(const bf16* row, int i, int d) const {
    return i < real ? unpack2(bf16(), *reinterpret_cast<const uint32_t*>(row + d)) : float2{0, 0};
  }
  // e^(b_i - b_j) of channels d and d + 1, j <= i
  __device__ float2 decay(int i, int j, int d) const {
    const float2 x = *reinterpret_cast<const float2*>(sums + i * C + d);
    const float2 y = *reinterpret_cast<const float2*>(sums + j * C + d);
    return {__expf(x.x - y.x), __expf(x.y - y.y)};
  }
};

// The products of the warp's own block, pair by pair.
template <int C>
__device__ inline void products_by_pairs(Fragments& w, const GivenRows<C>& given) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    if (j != warp()) continue;
#pragma unroll 1
    for (int n = 0; n < 8; ++n) {
      const int r = given.first + row_in(n % 4), s = given.first + 8 * (n / 4) + column_in(n % 4);
      float sum = 0;
      if (r >= s)
        for (int d = 0; d < C; d += 2) {
          const float2 x = given.query(r, d), y = given.key(s, d), by = given.decay(r, s, d);
          sum += x.x * y.x * by.x + x.y * y.y * by.y;
        }
#pragma unroll
      for (int m = 0; m < 8; ++m)
        if (m == n) w[2 * j + m / 4][m % 4] = sum;
    }
  }
}

// Queries of the warp's own block by all keys before and in it; elsewhere 0. The caller removes the
// pairs j > i.
template <int C>
__device__ inline void decayed_products(Fragments& w, Rows<C> queries, Rows<C> keys,
                                        const References<C>& refs, const GivenRows<C>& given,
                                        bool mild) {
  const int own = warp();
  const M::ARows<C> a_rows(queries, 16 * own);
  const M::BRows<C> b_rows(keys, 0);
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[2 * j][i] = w[2 * j + 1][i] = 0;
    if (j > own || (j == own && !mild)) continue;
#pragma unroll
    for (int d = 0; d < C; d += 16) {
      M::A a = a_rows.at(0, d);
      const int column = d + lane() % 4 * 2;
      if (j + 1 != own)
        a = scaled(a, refs.between(own, j, column), refs.between(own, j, column + 8));
      M::multiply<true>(w[2 * j], w[2 * j + 1], a, b_rows.at(16 * j, d));
    }
  }
  if (!mild) products_by_pairs(w, given);
}

// A fragment's two pieces of 8 bits each: what is left of x after the first is the second.
__device__ inline void split(const float (&x)[2][4], M::A& high, M::A& low) {
  float y[2][4];
  high = M::to_a_operand(x, 0);
  unpack(high, y[0], y[1]);
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i / 4][i % 4] = x[i / 4][i % 4] - y[i / 4][i % 4];
  low = M::to_a_operand(y, 0);
}

// The same as decayed_products with queries and keys of 16 bits, in three products: `low` is what
// `keys` leaves of the keys. Where the sums of a row cancel before a norm, 8 bits are not enough.
template <int C>
__device__ inline void exact_products(Fragments& w, Rows<C> keys, Rows<C> low,
                                      const References<C>& refs, const GivenRows<C>& given,
                                      bool mild) {
  const int own = warp();
  float queries[C / 8][4];
#pragma unroll
  for (int j = 0; j < C / 8; ++j) {
    const int column = 8 * j + lane() % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = given.first + lane() / 4 + 8 * h;
      const float2 x = given.query(row, column), by = refs.from(own, given.sums, row, column);
      queries[j][2 * h] = x.x * by.x, queries[j][2 * h + 1] = x.y * by.y;
    }
  }
  const M::BRows<C> high_rows(keys, 0), low_rows(low, 0);
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[2 * j][i] = w[2 * j + 1][i] = 0;
    if (j > own || (j == own && !mild)) continue;
#pragma unroll
    for (int d = 0; d < C; d += 16) {
      float x[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 by = refs.between(own, j, d + 8 * n + lane() % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = queries[d / 8 + n][i] * (i % 2 ? by.y : by.x);
      }
      M::A a, rest;
      split(x, a, rest);
      const M::B b = high_rows.at(16 * j, d);
      M::multiply<true>(w[2 * j], w[2 * j + 1], a, b);
      M::multiply<true>(w[2 * j], w[2 * j + 1], a, low_rows.at(16 * j, d));
      M::multiply<true>(w[2 * j], w[2 * j + 1], rest, b);
    }
  }
  if (!mild) products_by_pairs(w, given);
}

// x += y, times a factor of each column.
template <int n, class By>
__device__ inline void add_scaled(float (&x)[n][4], const float (&y)[n][4], const By& by) {
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float2 two = by(8 * j + lane() % 4 * 2);
    x[j][0] += two.x * y[j][0], x[j][1] += two.y * y[j][1];
    x[j][2] += two.x * y[j][2], x[j][3] += two.y * y[j][3];
  }
}

// The running sums of the log gates in each chunk, and queries and keys times their decay from its
// start or to its end. A thread takes one channel.
template <int C>
__global__ void decay_kernel(DeltaChunks p) {
  const int64_t record = int64_t(blockIdx.x) * (kThreads / C) + threadIdx.x / C;
  if (record >= p.records()) return;
  const Chunk c(p, record);
  const int d = int(threadIdx.x) % C;
  const int64_t first = c.token(p, 0) * C + d, own = record * kTokens * C + d;
  float b[kTokens], sum = 0;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    constexpr float kLeast = -100;  // e^-100 is 0 in float32
    if (i < c.real) sum += fmaxf(p.channel_logs[first + i * C], kLeast);
    b[i] = sum;
  }
  p.left[record * C + d] = __expf(sum);
  const bf16 *q = c.rows(p.q) + d, *k = c.rows(p.k) + d;
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float from = p.scale * __expf(b[i]), to = __expf(sum - b[i]);
    const float key = i < c.real ? float(k[i * p.k.row]) : 0;
    const float query = i < c.real ? float(q[i * p.q.row]) : 0;
    const int64_t at = own + i * C;
    p.channel_sums[at] = b[i];
    static_cast<bf16*>(p.q_from_start)[at] = bf16(query * from);
    static_cast<bf16*>(p.k_to_end)[at] = bf16(key * to);
    if (p.beta) static_cast<bf16*>(p.k_from_start)[at] = bf16(key * from);
  }
}

}  // namespace horner::attn::kernels::cuda::delta

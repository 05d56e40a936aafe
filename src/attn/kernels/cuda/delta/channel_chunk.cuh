// The results and the gradients of a chunk with gates of channels, given the states around it.
#pragma once

#include "attn/kernels/cuda/delta/chunk.cuh"

namespace horner::attn::kernels::cuda::delta {

template <int C>
struct ChannelOutputShape {
  static constexpr int kTile = kTokens * C * 2;
  static constexpr int kStateAt = 3 * kTile, kValuesAt = kStateAt + C * C * 2;
  static constexpr int kShareAt = kValuesAt + kTile, kReferencesAt = kShareAt + kTokens * 4;
  static constexpr int kBytes = kReferencesAt + (kBlocks + 1) * C * 4;
};

template <int C, bool corrected>
__global__ void __launch_bounds__(kThreads) channel_output_kernel(DeltaChunks p) {
  using Shape = ChannelOutputShape<C>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Chunk c(p, blockIdx.x);
  const uint32_t base = shared_address(memory);
  const Rows<C> k{base}, low{base + Shape::kTile}, from_start{base + 2 * Shape::kTile};
  const Rows<C> S{base + Shape::kStateAt}, v{base + Shape::kValuesAt};
  const Pairs rest{v.at};
  float* share = reinterpret_cast<float*>(memory + Shape::kShareAt);
  const References<C> refs{reinterpret_cast<float(*)[C]>(memory + Shape::kReferencesAt)};
  const float* sums = p.channel_sums + c.record * kTokens * C;
  copy_matrix<kTokens>(from_start, at(p.q_from_start, c.record, kTokens * C));
  copy_matrix<C>(S, at(p.S, c.record, C * C));
  if constexpr (corrected)
    copy_matrix<C>(rest, at(p.rest, c.record, C * kTokens));
  else
    c.copy(v, p.v);
  if (const int i = int(threadIdx.x); i < kTokens)
    share[i] = corrected ? p.share[c.record * kTokens + i] : 1;
  refs.load(sums);
  __syncthreads();
  put_decayed(k, c, p.k, sums, refs, true, &low);
  cp_async_wait_all();
  __syncthreads();

  const int own = 16 * warp();
  float N[1][C / 8][4], w[1][kTokens / 8][4];
  exact_products(w[0], k, low, refs, GivenRows<C>(c, p.q, p.k, sums, warp()), refs.is_mild(warp()));
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int s = 8 * j + column_in(i);
      w[0][j][i] = own + row_in(i) >= s ? p.scale * w[0][j][i] * share[s] : 0;
    }
  mma_abt<bf16>(N, from_start, own, S, 0);
  const M::BRows<kTokens> of_rest(rest, 0);
  const M::BColumns<C> of_values(v, 0, 0);
#pragma unroll
  for (int t = 0; t < kTokens / 16; ++t) {
    if (16 * t > own) continue;
    const M::A a = M::to_a_operand(w[0], t);
#pragma unroll
    for (int j = 0; j < C / 8; j += 2)
      M::multiply<true>(N[0][j], N[0][j + 1], a,
                        corrected ? of_rest.at(8 * j, 16 * t) : of_values.at(16 * t, 8 * j));
  }
  write_rows(N[0], from_start, own, static_cast<bf16*>(p.N) + c.token(p, own) * C, C, c.real - own);
}

template <int C, bool corrected>
struct ChannelGradientShape {
  static constexpr int kTile = kTokens * C * 2, kState = C * C * 2, kPairs = kTokens * kTokens * 2;
  static constexpr int kTiles = corrected ? 6 : 4;  // q, k, dN, values, k as queries, dv
  static constexpr int kStatesAt = kTiles * kTile, kPairsAt = kStatesAt + 2 * kState;
  static constexpr int kShareAt = kPairsAt + 2 * kPairs;
  static constexpr int kColumnsAt = kShareAt + kTokens * 4;                // [4, 64]
  static constexpr int kReferencesAt = kColumnsAt + kWarps * kTokens * 4;  // [5, C]
  static constexpr int kTotalsAt = kReferencesAt + (kBlocks + 1) * C * 4;  // [4, C], [2, C]
  static constexpr int kBytes = kTotalsAt + (kWarps + 2) * C * 4;
};

// The part of a block whose decay is too strong for a product: by pairs, with dx [i, j] of `pairs`.
// rows: dx and key j add to query i, times e^(b_i - b_j); otherwise dx and query i to key j.
template <int C>
__device__ inline void add_by_pairs(float (&d)[C / 8][4], float (&d_sums)[C / 8][4], Pairs pairs,
                                    const GivenRows<C>& given, bool rows) {
#pragma unroll 1
  for (int n = 0; n < C / 8; ++n)
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int mine = given.first + lane() / 4 + 8 * half, column = 8 * n + lane() % 4 * 2;
      float2 sum{0, 0};
#pragma unroll 1
      for (int m = 0; m < 16; ++m) {
        const int other = given.first + m, i = rows ? mine : other, j = rows ? other : mine;
        if (i < j) continue;
        const uint32_t word = load_word(pairs.element(i, j & ~1));
        const float2 two = unpack2(bf16(), word);
        const float dx = j & 1 ? two.y : two.x;
        const float2 x = rows ? given.key(j, column) : given.query(i, column);
        const float2 by = given.decay(i, j, column);
        sum.x += dx * x.x * by.x, sum.y += dx * x.y * by.y;
      }
      const float2 own = rows ? given.query(mine, column) : given.key(mine, column);
      const float sign = rows ? 1 : -1;
#pragma unroll
      for (int m = 0; m < C / 8; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (m == n && h == half) {
            d[m][2 * h] += sum.x, d[m][2 * h + 1] += sum.y;
            d_sums[m][2 * h] += sign * own.x * sum.x, d_sums[m][2 * h + 1] += sign * own.y * sum.y;
          }
    }
}

// From x, the gradient of a row of `tile` (a row of `given` times e^(b - r), or with of_keys times
// e^(r - b)), to that of the row; adds x tile, with its sign, to the gradient of b.
template <int C>
__device__ inline void undecay(float (&x)[C / 8][4], float (&d_sums)[C / 8][4], Rows<C> tile,
                               const float* sums, const References<C>& refs, bool of_keys) {
  const int own = 16 * warp();
#pragma unroll
  for (int j = 0; j < C / 8; ++j) {
    const int column = 8 * j + lane() % 4 * 2;
    const float2 r = *reinterpret_cast<const float2*>(&refs.r[warp() + of_keys][column]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = own + lane() / 4 + 8 * h;
      const float2 b = *reinterpret_cast<const float2*>(sums + row * C + column);
      const float2 y = load_pair(tile.element(row, column));
      const float sign = of_keys ? -1 : 1;
      d_sums[j][2 * h] += sign * y.x * x[j][2 * h];
      d_sums[j][2 * h + 1] += sign * y.y * x[j][2 * h + 1];
      x[j][2 * h] *= __expf(sign * (b.x - r.x)), x[j][2 * h + 1] *= __expf(sign * (b.y - r.y));
    }
  }
}

// The sums of a warp's rows from each one to the last, in place; the first row has the total.
template <int n>
__device__ inline void sums_to_last(float (&x)[n][4]) {
#pragma unroll
  for (int j = 0; j < n; ++j)
#pragma unroll
    for (int i = 3; i >= 0; --i) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        const float later = __shfl_down_sync(~0u, x[j][i], step);
        if (lane() + step < 32) x[j][i] += later;
      }
      if (i < 2) x[j][i] += __shfl_sync(~0u, x[j][i + 2], lane() % 4);
    }
}

template <int C, bool corrected>
__global__ void __launch_bounds__(kThreads) channel_gradient_kernel(DeltaChunks p) {
  using Shape = ChannelGradientShape<C, corrected>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Chunk c(p, blockIdx.x);
  const uint32_t base = shared_address(memory);
  const auto tile = [&](int i) { return Rows<C>{base + uint32_t(i * Shape::kTile)}; };
  const Rows<C> q = tile(0), k = tile(1), dN = tile(2), v = tile(3), key_queries = tile(4);
  const Pairs rest{v.at}, dv{tile(5).at};
  const Rows<C> S{base + Shape::kStatesAt}, dS{base + Shape::kStatesAt + Shape::kState};
  // Gradients of q.k; those of k.k, or the weights.
  const Pairs of_q{base + Shape::kPairsAt}, of_k{base + Shape::kPairsAt + Shape::kPairs};
  const Rows<C> low{of_q.at};  // of the keys, in the memory of both, until the weights are known
  float* share = reinterpret_cast<float*>(memory + Shape::kShareAt);
  auto columns = reinterpret_cast<float(*)[kTokens]>(memory + Shape::kColumnsAt);
  auto totals = reinterpret_cast<float(*)[C]>(memory + Shape::kTotalsAt);
  const References<C> refs{reinterpret_cast<float(*)[C]>(memory + Shape::kReferencesAt)};
  const float* sums = p.channel_sums + c.record * kTokens * C;
  const int64_t tokens = c.record * kTokens;
  c.copy(dN, p.dN);
  copy_matrix<C>(S, at(p.S, c.record, C * C)), copy_matrix<C>(dS, at(p.dS, c.record, C * C));
  if constexpr (corrected) {
    copy_matrix<C>(rest, at(p.rest, c.record, C * kTokens));
    copy_matrix<C>(dv, at(p.dv_t, c.record, C * kTokens));
  } else {
    c.copy(v, p.v);
  }
  if (const int i = int(threadIdx.x); i < kTokens) share[i] = corrected ? p.share[tokens + i] : 1;
  refs.load(sums);
  __syncthreads();
  put_decayed(q, c, p.q, sums, refs, false);
  put_decayed(k, c, p.k, sums, refs, true, corrected ? nullptr : &low);
  if constexpr (corrected) put_decayed(key_queries, c, p.k, sums, refs, false);
  cp_async_wait_all();
  __syncthreads();

  const int own = 16 * warp();
  const bool mild = refs.is_mild(warp());
  const GivenRows<C> given(c, p.q, p.k, sums, warp()), of_keys(c, p.k, p.k, sums, warp());
  const int rows[2] = {own + row_in(0), own + row_in(2)};
  float db[C / 8][4] = {}, dk[1][C / 8][4] = {}, column_sum[kTokens / 8][2] = {};
#pragma unroll
  for (int part = 0; part < (corrected ? 2 : 1); ++part) {  // N by q.k, then rest by k.k
    float w[1][kTokens / 8][4], d[1][kTokens / 8][4] = {};
    if constexpr (corrected) {
      decayed_products(w[0], part == 0 ? q : key_queries, k, refs, part == 0 ? given : of_keys,
                       mild);
    } else {
      exact_products(w[0], k, low, refs, given, mild);
      __syncthreads();
    }
    if constexpr (corrected) {
      const M::BColumns<kTokens> of_rest(rest, 0, 0);
      const M::ARows<C> of_dN(dN, own);
      const M::AColumns<kTokens> of_dv(dv, 0, own);
#pragma unroll
      for (int e = 0; e < C; e += 16) {
        const M::A a = part == 0 ? of_dN.at(0, e) : of_dv.at(e, 0);
#pragma unroll
        for (int j = 0; j < kTokens / 8; j += 2)
          M::multiply<true>(d[0][j], d[0][j + 1], a, of_rest.at(e, 8 * j));
      }
    } else {
      mma_abt<bf16>(d, dN, own, v, 0);
    }
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = own + row_in(i), s = 8 * j + column_in(i);
        const bool seen = part == 0 ? r >= s : r > s;
        const float by = seen ? (part == 0 ? p.scale : -p.scale) : 0;
        w[0][j][i] = seen ? by * w[0][j][i] : 0;
        column_sum[j][i % 2] += w[0][j][i] * d[0][j][i];
        d[0][j][i] *= by * share[s];
      }
    const M::Writer<kTokens> writer(part == 0 ? of_q : of_k, own), weights(of_k, own);
#pragma unroll
    for (int j = 0; j < kTokens / 8; j += 2) {
      const M::Rounded two[2] = {M::rounded(d[0][j]), M::rounded(d[0][j + 1])};
      writer.put(0, 8 * j, two);
      if constexpr (!corrected) {
        const M::Rounded both[2] = {M::rounded(w[0][j]), M::rounded(w[0][j + 1])};
        weights.put(0, 8 * j, both);
      }
    }
    // dq, or dk where a key takes from the state as a query does
    float sum[1][C / 8][4] = {};
    {
      const M::ARows<C> of_dN(dN, own);
      const M::AColumns<kTokens> of_dv(dv, 0, own);
      const M::BColumns<C> of_S(S, 0, 0);
      float x[C / 8][4] = {};
#pragma unroll
      for (int e = 0; e < C; e += 16) {
        const M::A a = part == 0 ? of_dN.at(0, e) : of_dv.at(e, 0);
#pragma unroll
        for (int j = 0; j < C / 8; j += 2) M::multiply<true>(x[j], x[j + 1], a, of_S.at(e, 8 * j));
      }
      const float by = part == 0 ? p.scale : -p.scale;
      add_scaled(sum[0], x, [&](int column) {
        const float2 r = refs.of(warp(), column);
        return float2{by * r.x, by * r.y};
      });
    }
    const M::BColumns<C> of_k_rows(k, 0, 0);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b > warp() || (b == warp() && !mild)) continue;
      const M::A a = M::to_a_operand(d[0], b);
      float x[C / 8][4] = {};
#pragma unroll
      for (int j = 0; j < C / 8; j += 2)
        M::multiply<true>(x[j], x[j + 1], a, of_k_rows.at(16 * b, 8 * j));
      add_scaled(sum[0], x, [&](int column) { return refs.between(warp(), b, column); });
    }
    undecay(sum[0], db, part == 0 ? q : key_queries, sums, refs, false);
    __syncwarp();
    if (!mild) add_by_pairs(sum[0], db, part == 0 ? of_q : of_k, part == 0 ? given : of_keys, true);
    if (part == 0) {
      bf16* to = static_cast<bf16*>(p.dq) + c.token(p, 0) * C;
#pragma unroll
      for (int j = 0; j < C / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (rows[h] < c.real)
            *reinterpret_cast<uint32_t*>(to + rows[h] * C + 8 * j + column_in(0)) =
                pack2(bf16(), sum[0][j][2 * h], sum[0][j][2 * h + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < C / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) dk[0][j][i] = sum[0][j][i];
    }
  }
  if constexpr (corrected)
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      const float2 two = column_sums(column_sum[j][0], column_sum[j][1]);
      if (lane() < 4)
        columns[warp()][8 * j + 2 * lane()] = two.x,
                                    columns[warp()][8 * j + 2 * lane() + 1] = two.y;
    }
  __syncthreads();

  // The keys as they enter the state: by the state after, by later queries and keys.
  float after[C / 8][4] = {}, d_share[2] = {};
  {
    const M::AColumns<kTokens> of_rest(rest, 0, own);
    const M::ARows<C> of_values(v, own);
    const M::BColumns<C> of_dS(dS, 0, 0);
    float x[C / 8][4] = {};
#pragma unroll
    for (int e = 0; e < C; e += 16) {
      const M::A a = corrected ? of_rest.at(e, 0) : of_values.at(0, e);
#pragma unroll
      for (int j = 0; j < C / 8; j += 2) M::multiply<true>(x[j], x[j + 1], a, of_dS.at(e, 8 * j));
    }
    add_scaled(after, x, [&](int column) { return refs.between(kBlocks, warp(), column); });
    if constexpr (corrected) {
      const float2 dot = row_dots<C>(after, k, own);
      d_share[0] = dot.x, d_share[1] = dot.y;
      scale_rows(after, share[rows[0]], share[rows[1]]);
    }
  }
  const M::AColumns<kTokens> by_q(of_q, 0, own), by_k(of_k, 0, own);
  const M::BColumns<C> queries(q, 0, 0), other_keys(key_queries, 0, 0);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if (b < warp() || (b == warp() && !mild)) continue;
    float x[C / 8][4] = {};
    const M::A a = by_q.at(16 * b, 0), a_k = by_k.at(16 * b, 0);
#pragma unroll
    for (int j = 0; j < C / 8; j += 2) {
      M::multiply<true>(x[j], x[j + 1], a, queries.at(16 * b, 8 * j));
      if constexpr (corrected) M::multiply<true>(x[j], x[j + 1], a_k, other_keys.at(16 * b, 8 * j));
    }
    add_scaled(after, x, [&](int column) { return refs.between(b, warp(), column); });
  }
  undecay(after, db, k, sums, refs, true);
  if (!mild) {
    add_by_pairs(after, db, of_q, given, false);
    if constexpr (corrected) add_by_pairs(after, db, of_k, of_keys, false);
  }
#pragma unroll
  for (int j = 0; j < C / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) dk[0][j][i] += after[j][i];

  if constexpr (corrected) {
    const M::AColumns<kTokens> of_dv(dv, 0, own);
#pragma unroll
    for (int e = 0; e < C; e += 16) {
      const M::A a = of_dv.at(e, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = own + lane() / 4 + i % 2 * 8, channel = e + i / 2 * 8 + lane() % 4 * 2;
        if (r < c.real)
          *reinterpret_cast<uint32_t*>(static_cast<bf16*>(p.dv) + c.token(p, r) * C + channel) =
              a.x[i];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = rows[h];
      d_share[h] += columns[0][r] + columns[1][r] + columns[2][r] + columns[3][r];
      const float norm = r < c.real ? p.own[tokens + r] : 0, per = norm != 0 ? 1 / norm : 0;
      const float by = -2 * share[r] * d_share[h] * p.scale * per;
      if (lane() % 4 == 0 && r < c.real) p.d_beta[c.token(p, r)] = p.most * d_share[h] * per;
#pragma unroll
      for (int j = 0; j < C / 8; ++j) {
        const float2 y = given.key(r, 8 * j + column_in(0));
        dk[0][j][2 * h] += by * y.x, dk[0][j][2 * h + 1] += by * y.y;
      }
    }
  } else {  // dv = weights^T dN + (e^(b_C - b) k) dS
    float x[1][C / 8][4] = {};
    const M::ARows<C> key_rows(k, own);
    const M::BRows<C> of_dS(dS, 0);
    const M::BColumns<C> of_dN(dN, 0, 0);
#pragma unroll
    for (int d = 0; d < C; d += 16) {
      const int column = d + lane() % 4 * 2;
      const M::A a = scaled(key_rows.at(0, d), refs.between(kBlocks, warp(), column),
                            refs.between(kBlocks, warp(), column + 8));
#pragma unroll
      for (int j = 0; j < C / 8; j += 2)
        M::multiply<true>(x[0][j], x[0][j + 1], a, of_dS.at(8 * j, d));
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      if (b < warp()) continue;
      const M::A a = by_k.at(16 * b, 0);
#pragma unroll
      for (int j = 0; j < C / 8; j += 2)
        M::multiply<true>(x[0][j], x[0][j + 1], a, of_dN.at(16 * b, 8 * j));
    }
    // v's rows are those of this warp alone, from here on
    write_rows(x[0], v, own, static_cast<bf16*>(p.dv) + c.token(p, own) * C, C, c.real - own);
  }
  // The gates: sums over later tokens, and what the state after the chunk carries on.
  sums_to_last(db);
  if (lane() < 4)
#pragma unroll
    for (int j = 0; j < C / 8; ++j)
      totals[warp()][8 * j + 2 * lane()] = db[j][0],
                                 totals[warp()][8 * j + 2 * lane() + 1] = db[j][1];
  {
    const int channel = int(threadIdx.x) % C, part = int(threadIdx.x) / C;
    constexpr int kParts = kThreads / C, kEach = C / kParts;
    float flow = 0;
    if (c.first + kTokens < p.T) {
      const bf16* next = at(static_cast<const void*>(p.S), c.record + 1, C * C);
      for (int e = part * kEach; e < (part + 1) * kEach; ++e) {
        const float2 two = load_pair(dS.element(e, channel & ~1));
        flow += float(next[e * C + channel]) * (channel & 1 ? two.y : two.x);
      }
    }
    totals[kWarps + part][channel] = flow;
    if (kParts == 1) totals[kWarps + 1][channel] = 0;
  }
  __syncthreads();
  // All products are done: q's tile is free.
  write_rows(dk[0], q, own, static_cast<bf16*>(p.dk) + c.token(p, own) * C, C, c.real - own);
#pragma unroll
  for (int j = 0; j < C / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = 8 * j + column_in(i);
      float later = totals[kWarps][channel] + totals[kWarps + 1][channel];
      for (int w = warp() + 1; w < kWarps; ++w) later += totals[w][channel];
      db[j][i] += later, db[j][i + 2] += later;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (rows[h] >= c.real) continue;
      const int64_t to = c.token(p, rows[h]) * C + 8 * j + column_in(0);
      if (p.d_channel_logs.dtype == Dtype::bfloat16)
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(p.d_channel_logs.at) + to) =
            pack2(bf16(), db[j][2 * h], db[j][2 * h + 1]);
      else
        *reinterpret_cast<float2*>(static_cast<float*>(p.d_channel_logs.at) + to) = {
            db[j][2 * h], db[j][2 * h + 1]};
    }
  }
}

}  // namespace horner::attn::kernels::cuda::delta

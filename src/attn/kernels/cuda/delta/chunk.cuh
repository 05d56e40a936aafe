// The results and the gradients of a chunk, given the states around it.
#pragma once

#include "attn/kernels/cuda/delta/solve.cuh"

namespace horner::attn::kernels::cuda::delta {

template <int C>
struct OutputShape {
  static constexpr int kTile = kTokens * C * 2, kState = C * C * 2;
  static constexpr int kKeysAt = kTile, kStateAt = 2 * kTile, kRestAt = kStateAt + kState;
  static constexpr int kNumbersAt = kRestAt + C * kTokens * 2;  // share, sums
  static constexpr int kBytes = kNumbersAt + 2 * kTokens * 4;
};

template <int C>
__global__ void __launch_bounds__(kThreads) output_kernel(DeltaChunks p) {
  using Shape = OutputShape<C>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Chunk c(p, blockIdx.x);
  const uint32_t base = shared_address(memory);
  const Rows<C> q{base}, k{base + Shape::kKeysAt}, S{base + Shape::kStateAt};
  const Pairs rest{base + Shape::kRestAt};
  float* share = reinterpret_cast<float*>(memory + Shape::kNumbersAt);
  float* sums = share + kTokens;
  c.copy(q, p.q), c.copy(k, p.k);
  copy_matrix<C>(S, at(p.S, c.record, C * C));
  copy_matrix<C>(rest, at(p.rest, c.record, C * kTokens));
  if (const int i = int(threadIdx.x); i < kTokens) {
    share[i] = p.share[c.record * kTokens + i], sums[i] = p.sums[c.record * kTokens + i];
  }
  cp_async_wait_all();
  __syncthreads();
  const int own = 16 * warp();
  const bool gated = p.logs != nullptr;
  float N[1][C / 8][4], w[1][kTokens / 8][4];
  mma_abt<bf16>(w, q, own, k, 0);
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = own + row_in(i), s = 8 * j + column_in(i);
      float y = r >= s ? p.scale * w[0][j][i] * share[s] : 0;
      if (gated && r >= s) y *= __expf(sums[r] - sums[s]);
      w[0][j][i] = y;
    }
  mma_abt<bf16>(N, q, own, S, 0);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float by = p.scale * (gated ? __expf(sums[own + row_in(i)]) : 1);
#pragma unroll
    for (int j = 0; j < C / 8; ++j) N[0][j][i] *= by;
  }
  const M::BRows<kTokens> of_rest(rest, 0);
#pragma unroll
  for (int t = 0; t < kTokens / 16; ++t) {
    const M::A a = M::to_a_operand(w[0], t);
#pragma unroll
    for (int j = 0; j < C / 8; j += 2)
      M::multiply<true>(N[0][j], N[0][j + 1], a, of_rest.at(8 * j, 16 * t));
  }
  bf16* to = static_cast<bf16*>(p.N) + c.token(p, own) * C;
  write_rows(N[0], q, own, to, C, c.real - own);
}

template <int C>
struct GradientShape {
  static constexpr int kTile = kTokens * C * 2, kState = C * C * 2, kPairs = kTokens * kTokens * 2;
  static constexpr int kStatesAt = 3 * kTile;                      // S, dS
  static constexpr int kValuesAt = kStatesAt + 2 * kState;         // rest, dv: transposed
  static constexpr int kPairsAt = kValuesAt + 2 * kTile;           // gradients of q.k and k.k
  static constexpr int kNumbersAt = kPairsAt + 2 * kPairs;         // share, sums, d_sums
  static constexpr int kColumnsAt = kNumbersAt + 3 * kTokens * 4;  // [4, 64]: of each warp
  static constexpr int kBytes = kColumnsAt + (kWarps + 1) * kTokens * 4;
};

// The sum over the rows of a warp's fragment, of its columns: for each lane's two columns.
__device__ inline float2 column_sums(float x, float y) {
#pragma unroll
  for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(~0u, x, i), y += __shfl_xor_sync(~0u, y, i);
  return {x, y};
}

// A warp's rows of `tile` times x, summed: for its two rows.
template <int C>
__device__ inline float2 row_dots(const float (&x)[C / 8][4], Rows<C> tile, int own) {
  float sum[2] = {};
#pragma unroll
  for (int j = 0; j < C / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 y = load_pair(tile.element(own + row_in(2 * i), 8 * j + column_in(0)));
      sum[i] += x[j][2 * i] * y.x + x[j][2 * i + 1] * y.y;
    }
  return {quad_sum(sum[0]), quad_sum(sum[1])};
}
template <int n>
__device__ inline void scale_rows(float (&x)[n][4], float first, float second) {
#pragma unroll
  for (int j = 0; j < n; ++j)
    x[j][0] *= first, x[j][1] *= first, x[j][2] *= second, x[j][3] *= second;
}

template <int C>
__global__ void __launch_bounds__(kThreads) gradient_kernel(DeltaChunks p) {
  using Shape = GradientShape<C>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Chunk c(p, blockIdx.x);
  const uint32_t base = shared_address(memory);
  const Rows<C> q{base}, k{base + Shape::kTile}, dN{base + 2 * Shape::kTile};
  const Rows<C> S{base + Shape::kStatesAt}, dS{base + Shape::kStatesAt + Shape::kState};
  const Pairs rest{base + Shape::kValuesAt}, dv{base + Shape::kValuesAt + Shape::kTile};
  const Pairs of_q{base + Shape::kPairsAt}, of_k{base + Shape::kPairsAt + Shape::kPairs};
  float* share = reinterpret_cast<float*>(memory + Shape::kNumbersAt);
  float *sums = share + kTokens, *d_sums = sums + kTokens;
  auto columns = reinterpret_cast<float(*)[kTokens]>(memory + Shape::kColumnsAt);
  c.copy(q, p.q), c.copy(k, p.k), c.copy(dN, p.dN);
  copy_matrix<C>(S, at(p.S, c.record, C * C)), copy_matrix<C>(dS, at(p.dS, c.record, C * C));
  copy_matrix<C>(rest, at(p.rest, c.record, C * kTokens));
  copy_matrix<C>(dv, at(p.dv_t, c.record, C * kTokens));
  const int64_t tokens = c.record * kTokens;
  if (const int i = int(threadIdx.x); i < kTokens)
    share[i] = p.share[tokens + i], sums[i] = p.sums[tokens + i];
  cp_async_wait_all();
  __syncthreads();

  const int own = 16 * warp();
  const bool gated = p.logs != nullptr;
  float row_sum[2] = {};             // of the weights times their gradients
  float column_sum[kTokens / 8][2];  // the same over queries, without the share
#pragma unroll
  for (int part = 0; part < 2; ++part) {  // N by q.k, then rest by k.k
    float w[1][kTokens / 8][4], d[1][kTokens / 8][4] = {};
    mma_abt<bf16>(w, part == 0 ? q : k, own, k, 0);
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
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = own + row_in(i), s = 8 * j + column_in(i);
        const bool seen = part == 0 ? r >= s : r > s;
        float by = seen ? (part == 0 ? p.scale : -p.scale) : 0;
        if (gated && seen) by *= __expf(sums[r] - sums[s]);
        const float dx = by * d[0][j][i], flow = dx * w[0][j][i];
        float& column = column_sum[j][i % 2];
        if (part == 0 && i < 2)
          column = flow;
        else
          column += flow;
        row_sum[i / 2] += flow * share[s];
        d[0][j][i] = dx * share[s];
      }
    const M::Writer<kTokens> writer(part == 0 ? of_q : of_k, own);
#pragma unroll
    for (int j = 0; j < kTokens / 8; j += 2) {
      const M::Rounded two[2] = {M::rounded(d[0][j]), M::rounded(d[0][j + 1])};
      writer.put(0, 8 * j, two);
    }
  }
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    const float2 two = column_sums(column_sum[j][0], column_sum[j][1]);
    if (lane() < 4)
      columns[warp()][8 * j + 2 * lane()] = two.x, columns[warp()][8 * j + 2 * lane() + 1] = two.y;
  }
  __syncthreads();

  const int rows[2] = {own + row_in(0), own + row_in(2)};
  float d_share[2], from_start[2], to_end[2], d_sum[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = rows[i];
    d_share[i] = columns[0][r] + columns[1][r] + columns[2][r] + columns[3][r];
    from_start[i] = p.scale * (gated ? __expf(sums[r]) : 1);
    to_end[i] = gated ? __expf(sums[kTokens - 1] - sums[r]) : 1;
    d_sum[i] = quad_sum(row_sum[i]) - share[r] * d_share[i];
  }
  {  // dq
    float dq[1][C / 8][4] = {};
    mma_ab_ss<C>(dq, dN, own, S, 0, 0);
    scale_rows(dq[0], from_start[0], from_start[1]);
    const float2 dot = row_dots<C>(dq[0], q, own);
    d_sum[0] += dot.x, d_sum[1] += dot.y;
    mma_ab_ss<kTokens>(dq, of_q, own, k, 0, 0);
    write_rows(dq[0], Rows<C>{base + 2 * Shape::kTile}, own,
               static_cast<bf16*>(p.dq) + c.token(p, own) * C, C, c.real - own);
  }
  // dk: by the state before, by the state after, by the other keys and queries
  float dk[1][C / 8][4] = {};
  const M::AColumns<kTokens> of_dv(dv, 0, own), of_rest(rest, 0, own);
  const M::BColumns<C> of_S(S, 0, 0), of_dS(dS, 0, 0);
#pragma unroll
  for (int e = 0; e < C; e += 16) {
    const M::A a = of_dv.at(e, 0);
#pragma unroll
    for (int j = 0; j < C / 8; j += 2)
      M::multiply<true>(dk[0][j], dk[0][j + 1], a, of_S.at(e, 8 * j));
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // dv, as it is
      const int r = own + lane() / 4 + i % 2 * 8, at_channel = e + i / 2 * 8 + lane() % 4 * 2;
      if (r < c.real)
        *reinterpret_cast<uint32_t*>(static_cast<bf16*>(p.dv) + c.token(p, r) * C + at_channel) =
            a.x[i];
    }
  }
  scale_rows(dk[0], -from_start[0], -from_start[1]);
  float2 dot = row_dots<C>(dk[0], k, own);
  d_sum[0] += dot.x, d_sum[1] += dot.y;
  {
    float after[1][C / 8][4] = {};
#pragma unroll
    for (int e = 0; e < C; e += 16) {
      const M::A a = of_rest.at(e, 0);
#pragma unroll
      for (int j = 0; j < C / 8; j += 2)
        M::multiply<true>(after[0][j], after[0][j + 1], a, of_dS.at(e, 8 * j));
    }
    dot = row_dots<C>(after[0], k, own);
    d_share[0] += to_end[0] * dot.x, d_share[1] += to_end[1] * dot.y;
    const float by[2] = {share[rows[0]] * to_end[0], share[rows[1]] * to_end[1]};
    d_sum[0] -= by[0] * dot.x, d_sum[1] -= by[1] * dot.y;
    scale_rows(after[0], by[0], by[1]);
#pragma unroll
    for (int j = 0; j < C / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[0][j][i] += after[0][j][i];
  }
  mma_ab_ss<kTokens>(dk, of_k, own, k, 0, 0);
  const M::AColumns<kTokens> by_q(of_q, 0, own), by_k(of_k, 0, own);
  const M::BColumns<C> queries(q, 0, 0), keys(k, 0, 0);
#pragma unroll
  for (int t = 0; t < kTokens; t += 16) {
    if (t < own) continue;
    const M::A a = by_q.at(t, 0), b = by_k.at(t, 0);
#pragma unroll
    for (int j = 0; j < C / 8; j += 2) {
      M::multiply<true>(dk[0][j], dk[0][j + 1], a, queries.at(t, 8 * j));
      M::multiply<true>(dk[0][j], dk[0][j + 1], b, keys.at(t, 8 * j));
    }
  }
  float through_own[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = rows[i];
    const float norm = r < c.real ? p.own[tokens + r] : 0, per = norm != 0 ? 1 / norm : 0;
    through_own[i] = -2 * share[r] * d_share[i] * p.scale * per;
    if (lane() % 4 == 0 && r < c.real) p.d_beta[c.token(p, r)] = p.most * d_share[i] * per;
    if (lane() % 4 == 0) d_sums[r] = d_sum[i];
  }
#pragma unroll
  for (int j = 0; j < C / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 y = load_pair(k.element(rows[i], 8 * j + column_in(0)));
      dk[0][j][2 * i] += through_own[i] * y.x, dk[0][j][2 * i + 1] += through_own[i] * y.y;
    }
  write_rows(dk[0], Rows<C>{base + 2 * Shape::kTile}, own,
             static_cast<bf16*>(p.dk) + c.token(p, own) * C, C, c.real - own);
  if (!p.d_logs) return;
  // A gate is part of the running sums of its token and the later ones, and of the state after.
  float flow = 0;
  if (c.first + kTokens < p.T) {
    const bf16* next = at(static_cast<const void*>(p.S), c.record + 1, C * C);
    for (int i = int(threadIdx.x); i < C * C / 2; i += kThreads) {
      const float2 x = unpack2(bf16(), reinterpret_cast<const uint32_t*>(next)[i]);
      const float2 y = load_pair(dS.element(2 * i / C, 2 * i % C));
      flow += x.x * y.x + x.y * y.y;
    }
  }
  for (int i = 1; i < 32; i *= 2) flow += __shfl_xor_sync(~0u, flow, i);
  if (lane() == 0) columns[kWarps][warp()] = flow;
  __syncthreads();
  if (warp() != 0) return;
  const float after =
      columns[kWarps][0] + columns[kWarps][1] + columns[kWarps][2] + columns[kWarps][3];
  const int last = kTokens - 1 - 2 * lane();
  const float2 later = running_sums(d_sums[last], d_sums[last - 1]);
  if (last < c.real) p.d_logs[c.token(p, last)] = after + later.x;
  if (last - 1 < c.real) p.d_logs[c.token(p, last - 1)] = after + later.y;
}

}  // namespace horner::attn::kernels::cuda::delta

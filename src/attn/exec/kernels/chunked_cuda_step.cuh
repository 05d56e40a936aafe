// Order 1, 16-bit: a chunk at once, whose tokens are read once. Forward, and backward
//   dq_t = a_t (S g_t + b_t z + sum_s (g_t.v_s + b_t) k_s),   b = dW / a
//   dk_s = R v_s + y + sum_t (a_t g_t.v_s + dW_t) q_t,   dv_s = R^T k_s + sum_t a_t w(x_ts) g_t
// S and z come from the keys before the chunk, R and y from the queries behind it. A warp first has
// sixteen queries, then sixteen keys: the least work in one is the most in the other.
#pragma once

#include "attn/exec/kernels/chunked_cuda_features.cuh"
#include "attn/exec/kernels/fused_cuda_forward.cuh"

namespace horner::attn::kernels::cuda {

// Tiles of tokens, states, and what else there is in shared memory.
template <int tiles, int states, int blocks>
struct StepShape {
  static constexpr int kTokens = kChunkUnit, kWarps = kTokens / 16, kThreads = 32 * kWarps;
  static constexpr int kBlocks = blocks, kTile = kTokens * 128, kState = 64 * 128;
  static constexpr int kStatesAt = tiles * kTile, kColumn = 4 * 4 * kTileColumn;
  static constexpr int kColumnsAt = kStatesAt + states * kState;
  static constexpr int kConstantsAt = kColumnsAt + states * kColumn;
  static constexpr int kSharesAt = kConstantsAt + states * 4 * kConstantSums;
  static constexpr int kBytes = kSharesAt + kTokens * 16;
  // Of RunningSums.
  static constexpr bool kDecay = false, kRaw = false;
  static constexpr int kAtoms = 1, kKeys = 16;
};

// A query's factors: of its scores and of g v, and what is added to each.
struct StepShare {
  float by, constant, dW, unused;
};

template <class Shape>
struct ChunkStep {
  using M = Mma<bf16>;
  using Rows = Tile<bf16, 64>;
  using Sums = float[8][4];
  static constexpr int kTokens = Shape::kTokens, kThreads = Shape::kThreads;

  const Chunks& p;
  const Fused& f;
  unsigned char* memory;
  int key_head, b, g, chunk, first, own;  // `first` token of the chunk, `own` of the warp in it

  __device__ ChunkStep(const Chunks& p, unsigned char* memory, int key_head)
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
  // z of sixteen monomials, and the constant's sums.
  __device__ uint32_t column(int i, int block) const {
    return shared_address(memory + Shape::kColumnsAt + i * Shape::kColumn) +
           uint32_t(block * 4 * kTileColumn);
  }
  __device__ float* constant(int i) const {
    return reinterpret_cast<float*>(memory + Shape::kConstantsAt) + i * kConstantSums;
  }

  // The state since the segment's beginning and the segment's, added.
  __device__ void load_state(int i, const ChunkStates& from) const {
    const int tiles = p.tiles(), n = int(threadIdx.x);
    const int64_t record = int64_t(key_head) * p.chunks() + chunk;
    const float* const segment =
        from.segments +
        (int64_t(key_head) * p.segments() + chunk / p.segment) * (tiles + 1) * kTileSums;
    const bf16* const S = static_cast<const bf16*>(from.S) + record * tiles * 1024;
#pragma unroll
    for (int at = n; at < 64 * 8; at += kThreads) {
      const int row = at / 8;
      uint4 sum{};
      if (row < 16 * tiles) {
        const uint4 near = *reinterpret_cast<const uint4*>(S + 8 * at);
        const uint32_t of[4] = {near.x, near.y, near.z, near.w};
        const float* const far = segment + row / 16 * kTileSums + row % 16 * 64 + at % 8 * 8;
        uint32_t y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 a = floats(of[j]), b = *reinterpret_cast<const float2*>(far + 2 * j);
          y[j] = pair(bf16(), (a.x + b.x) * unit(), (a.y + b.y) * unit());
        }
        sum = {y[0], y[1], y[2], y[3]};
      }
      *static_cast<uint4*>(__cvta_shared_to_generic(state(i).chunk(row, at % 8))) = sum;
    }
    if (n < 32) {
      const int row = 2 * n;
      float2 z{};
      if (row < 16 * tiles) {
        const float* const far = segment + row / 16 * kTileSums + 1024 + row % 16;
        const float* const near = reinterpret_cast<const float*>(from.z) + record * tiles * 16;
        z = {(near[row] + far[0]) * unit(), (near[row + 1] + far[1]) * unit()};
      }
      Factors<bf16>::store_column(
          static_cast<uint32_t*>(__cvta_shared_to_generic(column(i, row / 16))), row % 16, z.x,
          z.y);
    }
    if (n <= 64)
      constant(i)[n] = p.w.c[0] == 0 ? 0
                                     : (from.constant[record * kConstantSums + n] +
                                        segment[tiles * kTileSums + (n < 64 ? n : 1024)]) *
                                           p.w.c[0];
  }
  __device__ void copy_keys() const {
    copy_rows<kTokens, kThreads>(k(), row_of<bf16>(f.k, b, g, first), f.k.row, f.S - first, f.D);
    copy_rows<kTokens, kThreads>(v(), row_of<bf16>(f.v, b, g, first), f.v.row, f.S - first, f.E);
  }
  __device__ void copy_queries(Rows to, const View& x, int head, int channels) const {
    copy_rows<kTokens, kThreads>(to, row_of<bf16>(x, b, head, first), x.row, f.T - first, channels);
  }
  __device__ StepShare* shares() const {
    return reinterpret_cast<StepShare*>(memory + Shape::kSharesAt);
  }
  __device__ void load_shares(int head) const {
    const int real = f.T - first, n = int(threadIdx.x);
    if (n >= kTokens) return;
    Query query = f.queries[int64_t(b * f.H + head) * f.T + first + (n < real ? n : 0)];
    if (n >= real) query.a = query.dW = 0;
    shares()[n] = {query.a * unit(), query.a * p.w.c[0], query.dW * unit(), 0};
  }
  __device__ bool is_kept(int s) const {
    return !f.seen.keep || (s < f.S && f.seen.keep[int64_t(b) * f.S + s]);
  }
  // Hidden keys give nothing to dq.
  __device__ void hide_keys() const {
    for (int at = int(threadIdx.x); at < 8 * kTokens; at += kThreads)
      if (!is_kept(first + at / 8))
        *static_cast<uint4*>(__cvta_shared_to_generic(k().chunk(at / 8, at % 8))) = uint4{};
  }

  static __device__ void load_left(typename M::A (&left)[4], Rows x, int row) {
    const M::LeftRows<64> rows(x, row);
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = rows.at(0, 16 * i);
  }
  // Sums of sixteen rows with sixteen rows of `right`, or with all of a state.
  template <int n>
  static __device__ void add_by_rows(float (&c)[n][4], const M::A (&left)[4], Rows right, int row) {
    const M::RightRows<64> rights(right, row);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < n; j += 2)
        M::multiply<true>(c[j], c[j + 1], left[i], rights.at(8 * j, 16 * i));
  }
  static __device__ void add_by_columns(Sums& c, const M::A& left, Rows right, int row) {
    const M::RightColumns<64> rights(right, row, 0);
#pragma unroll
    for (int j = 0; j < 8; j += 2) M::multiply<true>(c[j], c[j + 1], left, rights.at(0, 8 * j));
  }
  __device__ float2 column_pair(int i, int j) const {
    return Factors<bf16>::stored_pair(column(i, j / 2), j % 2 * 8 + lane() % 4 * 2);
  }

  // Rows of a warp to memory: through rows of its own in shared memory, so that they go in pieces
  // of 16 bytes.
  template <class By>
  __device__ void store(void* to, int64_t row, int channels, int real, Rows through, const Sums& c,
                        const By& by) const {
    const M::Writer<64> writer(through, own);
    const float upper = by(lane() / 4), lower = by(lane() / 4 + 8);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x[4] = {c[j][0] * upper, c[j][1] * upper, c[j][2] * lower, c[j][3] * lower};
      writer.put(0, 8 * j, x);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane() / 8, at = lane() % 8;
      if (r < real && 8 * at < channels)
        *reinterpret_cast<uint4*>(static_cast<bf16*>(to) + (row + r) * channels + 8 * at) =
            *static_cast<const uint4*>(__cvta_shared_to_generic(through.chunk(own + r, at)));
    }
  }

  // Whether a score of the tile on the diagonal is hidden: of number n of tile j.
  static __device__ bool is_after(int j, int n) {  // its column behind its row
    return 8 * j + lane() % 4 * 2 + n % 2 > lane() / 4 + n / 2 * 8;
  }
  static __device__ bool is_before(int j, int n) {
    return 8 * j + lane() % 4 * 2 + n % 2 < lane() / 4 + n / 2 * 8;
  }

  __device__ void queries(int head) const {
    const int real = f.T - first - own;
    const int64_t row = int64_t(b * f.H + head) * f.T + first + own;
    if (real <= 0) return;
    float a[2], ratio[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = lane() / 4 + 8 * r;
      const Query query = f.queries[row + (t < real ? t : 0)];  // where a is 0, so is dW
      a[r] = query.a, ratio[r] = query.a == 0 ? 0 : query.dW / query.a;
    }
    M::A left[4];
    load_left(left, d_o(), own);
    Sums dq = {};
    if (!is_first()) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 z = column_pair(0, j);
#pragma unroll
        for (int n = 0; n < 4; ++n) dq[j][n] = (n % 2 ? z.y : z.x) * ratio[n / 2];
      }
      add_by_rows(dq, left, state(0), 0);
    }
#pragma unroll 2
    for (int s = 0; s <= own; s += 16) {
      float x[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = ratio[i / 2 % 2];
      add_by_rows(x, left, v(), s);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i / 4][i % 4] *= unit();
        if (s == own && is_after(i / 4, i % 4)) x[i / 4][i % 4] = 0;
      }
      add_by_columns(dq, M::a_of_sums(x, 0), k(), s);
    }
    store(f.dq, row, f.D, real, tile(4), dq, [&](int r) { return r < 8 ? a[0] : a[1]; });
  }

  __device__ void keys_from_state(Sums& dk, Sums& dv) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 y = column_pair(1, j);
      const float2 c = *reinterpret_cast<const float2*>(constant(1) + 8 * j + lane() % 4 * 2);
      dk[j][0] = dk[j][2] = y.x, dk[j][1] = dk[j][3] = y.y;
      dv[j][0] = dv[j][2] = c.x, dv[j][1] = dv[j][3] = c.y;
    }
    M::A left[4];
    load_left(left, v(), own);
    add_by_rows(dk, left, state(1), 0);
    load_left(left, k(), own);
#pragma unroll
    for (int i = 0; i < 4; ++i) add_by_columns(dv, left[i], state(1), 16 * i);
  }
  __device__ void keys_from_chunk(Sums& dk, Sums& dv) const {
    M::A of_k[4];
    load_left(of_k, k(), own);
#pragma unroll 1
    for (int t = own; t < kTokens; t += 16) {
      float x[2][4] = {}, dp[2][4] = {};
      add_by_rows(x, of_k, q(), t);
      M::A of_v[4];
      load_left(of_v, v(), own);
      add_by_rows(dp, of_v, d_o(), t);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const StepShare share = shares()[t + 8 * j + lane() % 4 * 2 + n];
#pragma unroll
          for (int i = n; i < 4; i += 2) {
            x[j][i] = x[j][i] * share.by + share.constant;
            dp[j][i] = dp[j][i] * share.by + share.dW;
            if (t == own && is_before(j, i)) x[j][i] = dp[j][i] = 0;
          }
        }
      add_by_columns(dv, M::a_of_sums(x, 0), d_o(), t);
      add_by_columns(dk, M::a_of_sums(dp, 0), q(), t);
    }
  }
  __device__ void store_keys(const Sums& dk, const Sums& dv) const {
    const int s0 = first + own, real = f.S - s0;
    const int64_t row = int64_t(key_head) * f.S + s0;
    const auto kept = [&](int r) { return is_kept(s0 + r) ? 1.f : 0.f; };
    store(f.dk, row, f.D, real, tile(4), dk, kept);
    store(f.dv, row, f.E, real, tile(4), dv, kept);
  }

  __device__ void forward(int h) const {
    const Head head(b, h, g);
    const int t0 = first + own, real = f.T - t0;
    if (real <= 0) return;
    M::A left[4];
    load_left(left, q(), own);
    RunningSums<bf16, 64, Quadratic, Shape> sums(f, p.w, head, t0 + lane() / 4);
    auto& N = sums.N[0];
    auto& sum = sums.sum[0];
    if (!is_first()) {
      float W[4] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 c = *reinterpret_cast<const float2*>(constant(0) + 8 * j + lane() % 4 * 2);
        N[j][0] = N[j][2] = c.x, N[j][1] = N[j][3] = c.y;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        add_by_columns(N, left[i], state(0), 16 * i);
        Factors<bf16>::add_column(W, left[i], Factors<bf16>::stored_column(column(0, i), 0));
      }
      if (lane() % 4 == 0)
        sum[0] = W[0] + W[1] + constant(0)[64], sum[1] = W[2] + W[3] + constant(0)[64];
    }
#pragma unroll 2
    for (int s = 0; s <= own; s += 16) {
      float x[2][4] = {};
      add_by_rows(x, left, k(), s);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& y = x[i / 4][i % 4];
        y = y * unit() + p.w.c[0];
        if (s == own && is_after(i / 4, i % 4)) y = 0;
      }
      if (f.seen.keep)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (!is_kept(first + s + i / 4 * 8 + lane() % 4 * 2 + i % 2)) x[i / 4][i % 4] = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        sum[r] += x[0][2 * r] + x[0][2 * r + 1] + (x[1][2 * r] + x[1][2 * r + 1]);
      add_by_columns(N, M::a_of_sums(x, 0), v(), s);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float r = sums.normalise(i);
      if (f.u) sums.store(f.u, i);
      sums.scale(i, r);
    }
    store(f.o, head.row(f, t0), f.E, real, q(), N, [](int) { return 1.f; });
  }
};

using ForwardStep = StepShape<3, 1, 3>;
static __global__ __launch_bounds__(
    ForwardStep::kThreads,
    ForwardStep::kBlocks) void chunk_forward_step(const __grid_constant__ Chunks p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Head head(p.f, int(blockIdx.x));
  const ChunkStep<ForwardStep> step(p, memory, head.b * p.f.G + head.g);
  step.copy_queries(step.q(), p.f.q, head.h, p.f.D);
  step.copy_keys();
  if (!step.is_first()) step.load_state(0, p.before);
  wait_for_copies();
  __syncthreads();
  step.forward(head.h);
}

using BackwardStep = StepShape<5, 2, 2>;
static __global__ __launch_bounds__(
    BackwardStep::kThreads,
    BackwardStep::kBlocks) void chunk_backward_step(const __grid_constant__ Chunks p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const ChunkStep<BackwardStep> step(p, memory, int(blockIdx.x));
  const int each = p.f.H / p.f.G, heads = step.g * each;
  const auto copy = [&](int h) {
    step.copy_queries(step.q(), p.f.q, heads + h, p.f.D);
    step.copy_queries(step.d_o(), p.f.d_o, heads + h, p.f.E);
    step.load_shares(heads + h);
  };
  step.copy_keys();
  copy(0);
  if (!step.is_first()) step.load_state(0, p.before);
  if (!step.is_last()) step.load_state(1, p.behind);
  wait_for_copies();
  __syncthreads();
  if (p.f.seen.keep) {
    step.hide_keys();
    __syncthreads();
  }
  const auto next_queries = [&](int h) {
    __syncthreads();
    copy(h);
    wait_for_copies();
    __syncthreads();
  };
  for (int h = 0; h < each; ++h) {
    if (h > 0) next_queries(h);
    step.queries(heads + h);
  }
  float dk[8][4] = {}, dv[8][4] = {};
  if (!step.is_last()) step.keys_from_state(dk, dv);
  for (int h = each - 1; h >= 0; --h) {  // the last are there
    if (h + 1 < each) next_queries(h);
    step.keys_from_chunk(dk, dv);
  }
  step.store_keys(dk, dv);
}

}  // namespace horner::attn::kernels::cuda

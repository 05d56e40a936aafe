// Order 1, bf16: one thread block per chunk, which reads its keys once. Forward, and backward
//   dq_t = a_t (S g_t + b_t z + sum_s (g_t.v_s + b_t) k_s),   b = dW / a
//   dk_s = R v_s + y + sum_t (a_t g_t.v_s + dW_t) q_t,   dv_s = R^T k_s + sum_t a_t w(x_ts) g_t
// S and z come from the keys before the chunk, R and y from the queries after it. Each warp owns
// sixteen queries, then sixteen keys: the least work in one phase is the most in the other.
#pragma once

#include "attn/kernels/cuda/chunked/chunk.cuh"
#include "attn/kernels/cuda/common/row_sums.cuh"

namespace horner::attn::kernels::cuda {

template <class Shape>
struct LinearChunk : LinearChunkTiles<Shape> {
  using Base = LinearChunkTiles<Shape>;
  using M = Mma<bf16>;
  using typename Base::Rows;
  using Sums = float[8][4];
  using Base::is_first, Base::is_last, Base::is_kept, Base::unit, Base::factors, Base::column_pair;
  using Base::kTokens, Base::LinearChunkTiles, Base::gates, Base::decay_between, Base::last;
  using Base::p, Base::f, Base::key_head, Base::b, Base::g, Base::first, Base::own;
  using Base::q, Base::k, Base::v, Base::d_o, Base::state, Base::column, Base::constant;

  static __device__ void load_a_operand(typename M::A (&a_frag)[4], Rows x, int row) {
    const M::ARows<64> rows(x, row);
#pragma unroll
    for (int i = 0; i < 4; ++i) a_frag[i] = rows.at(0, 16 * i);
  }
  // c += a b^T over 8 n rows of b from `row`; then c += a b over sixteen rows of b.
  template <int n>
  static __device__ void mma_abt_add(float (&c)[n][4], const M::A (&a_frag)[4], Rows b, int row) {
    const M::BRows<64> b_tile(b, row);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < n; j += 2)
        M::multiply<true>(c[j], c[j + 1], a_frag[i], b_tile.at(8 * j, 16 * i));
  }
  static __device__ void mma_ab_add(Sums& c, const M::A& a_frag, Rows b, int row) {
    const M::BColumns<64> b_tile(b, row, 0);
#pragma unroll
    for (int j = 0; j < 8; j += 2) M::multiply<true>(c[j], c[j + 1], a_frag, b_tile.at(0, 8 * j));
  }

  // Stores a warp's rows in 16-byte vectors: warp shuffles transpose words among the four lanes of
  // a row until each holds a vector. Given x and relu, only where x is positive; 0 elsewhere.
  template <class By>
  __device__ void store(void* to, int64_t row, int channels, int real, const Sums& c, const By& by,
                        const Rows* x = nullptr) const {
    const bool odd = lane() & 1, upper = lane() & 2;
    const auto exchange = [](uint32_t& a, uint32_t& b, bool first, int with) {
      const uint32_t y = __shfl_xor_sync(~0u, first ? a : b, with);
      (first ? a : b) = y;
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = lane() / 4 + 8 * r;
      const float times = by(t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          w[j] = pack2(bf16(), c[4 * half + j][2 * r] * times, c[4 * half + j][2 * r + 1] * times);
        exchange(w[0], w[1], odd, 1);
        exchange(w[2], w[3], odd, 1);
        exchange(w[0], w[2], upper, 2);
        exchange(w[1], w[3], upper, 2);
        const int at = 8 * (4 * half + lane() % 4);
        if (x && p.relu) {
          const uint4 y =
              *static_cast<const uint4*>(__cvta_shared_to_generic(x->chunk(own + t, at / 8)));
          w[0] = where_positive(w[0], y.x), w[1] = where_positive(w[1], y.y);
          w[2] = where_positive(w[2], y.z), w[3] = where_positive(w[3], y.w);
        }
        if (t < real && at < channels)
          *reinterpret_cast<uint4*>(static_cast<bf16*>(to) + (row + t) * channels + at) = {
              w[0], w[1], w[2], w[3]};
      }
    }
  }

  // Whether element n of fragment j is masked, in the tile of scores on the diagonal.
  static __device__ bool is_above_diagonal(int j, int n) {  // column > row
    return 8 * j + lane() % 4 * 2 + n % 2 > lane() / 4 + n / 2 * 8;
  }
  static __device__ bool is_below_diagonal(int j, int n) {
    return 8 * j + lane() % 4 * 2 + n % 2 < lane() / 4 + n / 2 * 8;
  }

  // Gates of a thread's rows and columns, in a tile of scores.
  struct Gates {
    float row[2], column[2][2];
  };
  __device__ Gates gates_of(int rows, int columns) const {
    Gates x{};
    if constexpr (Shape::kDecay)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const at = gates() + columns + 8 * i + lane() % 4 * 2;
        x.row[i] = gates()[rows + 8 * i + lane() / 4];
        x.column[i][0] = at[0], x.column[i][1] = at[1];
      }
    return x;
  }
  // Applies the decay factor of each row to what a state contributed.
  template <class By>
  static __device__ void decay_rows(Sums& c, const By& by) {
    if constexpr (Shape::kDecay) {
      const float decay[2] = {by(lane() / 4), by(lane() / 4 + 8)};
#pragma unroll
      for (int i = 0; i < 32; ++i) c[i / 4][i % 4] *= decay[i / 2 % 2];
    }
  }
  __device__ float query_decay(int r) const { return decay_between(gates()[own + r], 0); }
  __device__ float key_decay(int r) const {
    return decay_between(gates()[last() - first], gates()[own + r]);
  }

  __device__ void queries(int head) const {
    const int real = f.T - first - own;
    const int64_t row = int64_t(b * f.H + head) * f.T + first + own;
    if (real <= 0) return;
    float a[2], ratio[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = lane() / 4 + 8 * r;
      const Query query = f.queries[row + (t < real ? t : 0)];  // dW is 0 where a is 0
      a[r] = query.a, ratio[r] = query.a == 0 ? 0 : query.dW / query.a;
    }
    M::A a_frag[4];
    load_a_operand(a_frag, d_o(), own);
    Sums dq = {};
    if (!is_first()) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 z = column_pair(0, j);
#pragma unroll
        for (int n = 0; n < 4; ++n) dq[j][n] = (n % 2 ? z.y : z.x) * ratio[n / 2];
      }
      mma_abt_add(dq, a_frag, state(0), 0);
      decay_rows(dq, [&](int r) { return query_decay(r); });
    }
#pragma unroll 1
    for (int s = 0; s <= own; s += 16) {
      float x[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = ratio[i / 2 % 2];
      mma_abt_add(x, a_frag, v(), s);
      const Gates at = gates_of(own, s);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i / 4][i % 4] *= unit();
        if (Shape::kDecay)
          x[i / 4][i % 4] *= decay_between(at.row[i / 2 % 2], at.column[i / 4][i % 2]);
        if (s == own && is_above_diagonal(i / 4, i % 4)) x[i / 4][i % 4] = 0;
      }
      mma_ab_add(dq, M::to_a_operand(x, 0), k(), s);
    }
    const Rows of = q();
    store(f.dq, row, f.D, real, dq, [&](int r) { return r < 8 ? a[0] : a[1]; }, &of);
  }

  // Adds the queries of the chunk to dv (`of_values`) or dk of the warp's sixteen keys.
  template <bool of_values>
  __device__ void add_queries(Sums& sums, float (&d_decay)[2]) const {
    M::A a_frag[4];
    load_a_operand(a_frag, of_values ? k() : v(), own);
    const Rows b = of_values ? q() : d_o(), c = of_values ? d_o() : q();
#pragma unroll 1
    for (int t = own; t < kTokens; t += 16) {
      float x[2][4] = {};
      mma_abt_add(x, a_frag, b, t);
      const Gates at = gates_of(own, t);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const QueryFactors query = factors()[t + 8 * j + lane() % 4 * 2 + n];
#pragma unroll
          for (int i = n; i < 4; i += 2) {
            const bool hidden = t == own && is_below_diagonal(j, i);
            const float decay = Shape::kDecay ? decay_between(at.column[j][n], at.row[i / 2]) : 1;
            if (Shape::kDecay && of_values && !hidden)
              d_decay[i / 2] += (x[j][i] * query.dW + query.constant_dW) * decay;
            x[j][i] = x[j][i] * query.by + (of_values ? query.constant : query.dW);
            if (Shape::kDecay) x[j][i] *= decay;
            if (hidden) x[j][i] = 0;
          }
        }
      mma_ab_add(sums, M::to_a_operand(x, 0), c, t);
    }
  }
  template <bool of_values>
  __device__ void apply_suffix_state(Sums& sums) const {
    M::A a_frag[4];
    load_a_operand(a_frag, of_values ? k() : v(), own);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 y = of_values
                           ? *reinterpret_cast<const float2*>(constant(1) + 8 * j + lane() % 4 * 2)
                           : column_pair(1, j);
      sums[j][0] = sums[j][2] = y.x, sums[j][1] = sums[j][3] = y.y;
    }
    if constexpr (of_values) {
#pragma unroll
      for (int n = 0; n < 4; ++n) mma_ab_add(sums, a_frag[n], state(1), 16 * n);
    } else {
      mma_abt_add(sums, a_frag, state(1), 0);
    }
    decay_rows(sums, [&](int r) { return key_decay(r); });
  }
  // d_decay_key = -(v.dv + sum_t w dW_t); `d_decay` holds the second term of the chunk's queries.
  __device__ void store_gates(const Sums& dv, const float (&d_decay)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int s = own + lane() / 4 + 8 * r;
      float state = lane() % 4 == 0 && !is_last() ? constant(1)[64] : 0, sum = d_decay[r];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int c = 8 * j + lane() % 4 * 2;
        const float2 of_v = load_pair(bf16(), v().element(s, c));
        sum += dv[j][2 * r] * of_v.x + dv[j][2 * r + 1] * of_v.y;
        if (is_last()) continue;
        const float2 of_k = load_pair(bf16(), k().element(s, c)), y = column_pair(1, j);
        state += of_k.x * y.x + of_k.y * y.y;
      }
      sum = quad_sum(sum + state * key_decay(lane() / 4 + 8 * r));
      if (lane() % 4 == 0 && first + s < f.S)
        f.d_decay_key[int64_t(key_head) * f.S + first + s] = is_kept(first + s) ? -sum : 0;
    }
  }
  template <class Next>
  __device__ void keys(int each, const Next& next) const {
    const int s0 = first + own;
    const auto kept = [&](int r) { return is_kept(s0 + r) ? 1.f : 0.f; };
    const auto part = [&]<bool of_values>(std::bool_constant<of_values>, void* to, int channels) {
      Sums sums = {};
      float d_decay[2] = {};
      if (!is_last()) apply_suffix_state<of_values>(sums);
      for (int h = 0; h < each; ++h) {
        next(h, of_values);
        add_queries<of_values>(sums, d_decay);
      }
      if constexpr (Shape::kDecay && of_values) store_gates(sums, d_decay);
      const Rows of = k();
      store(to, int64_t(key_head) * f.S + s0, channels, f.S - s0, sums, kept,
            of_values ? nullptr : &of);
    };
    part(std::true_type(), f.dv, f.E);
    part(std::false_type(), f.dk, f.D);
  }

  __device__ void forward(int h) const {
    const Head head(b, h, g);
    const int t0 = first + own, real = f.T - t0;
    if (real <= 0) return;
    M::A a_frag[4];
    load_a_operand(a_frag, q(), own);
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
        mma_ab_add(N, a_frag[i], state(0), 16 * i);
        Features<bf16>::add_column(W, a_frag[i], Features<bf16>::stored_column(column(0, i), 0));
      }
      if (lane() % 4 == 0)
        sum[0] = W[0] + W[1] + constant(0)[64], sum[1] = W[2] + W[3] + constant(0)[64];
      decay_rows(N, [&](int r) { return query_decay(r); });
      if constexpr (Shape::kDecay)
        sum[0] *= query_decay(lane() / 4), sum[1] *= query_decay(lane() / 4 + 8);
    }
#pragma unroll 1
    for (int s = 0; s <= own; s += 16) {
      float x[2][4] = {};
      mma_abt_add(x, a_frag, k(), s);
      const Gates at = gates_of(own, s);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& y = x[i / 4][i % 4];
        y = y * unit() + p.w.c[0];
        if (Shape::kDecay) y *= decay_between(at.row[i / 2 % 2], at.column[i / 4][i % 2]);
        if (s == own && is_above_diagonal(i / 4, i % 4)) y = 0;
      }
      if (f.seen.keep)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (!is_kept(first + s + i / 4 * 8 + lane() % 4 * 2 + i % 2)) x[i / 4][i % 4] = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        sum[r] += x[0][2 * r] + x[0][2 * r + 1] + (x[1][2 * r] + x[1][2 * r + 1]);
      mma_ab_add(N, M::to_a_operand(x, 0), v(), s);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float r = sums.normalise(i);
      if (f.u) sums.store(f.u, i);
      sums.scale(i, r);
    }
    store(f.o, head.row(f, t0), f.E, real, N, [](int) { return 1.f; });
  }
};

template <bool decay>
using LinearForward = LinearChunkShape<3, 1, 3, decay>;
template <class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void linear_chunk_forward_kernel(
    const __grid_constant__ Chunks p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const Head head(p.f, int(blockIdx.x));
  const LinearChunk<Shape> block(p, memory, head.b * p.f.G + head.g);
  block.copy_queries(block.q(), p.f.q, head.h, p.f.D);
  block.copy_keys();
  block.load_gates();
  if (!block.is_first()) block.store_state(0, block.load_state(p.prefix, false));
  cp_async_wait_all();
  block.rectify(block.q());
  block.rectify(block.k());
  __syncthreads();
  block.forward(head.h);
}

template <bool decay>
using LinearBackward = LinearChunkShape<4, 2, 2, decay>;
template <class Shape>
__global__ __launch_bounds__(Shape::kThreads, Shape::kBlocks) void linear_chunk_backward_kernel(
    const __grid_constant__ Chunks p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const LinearChunk<Shape> block(p, memory, int(blockIdx.x));
  const int each = p.f.H / p.f.G, heads = block.g * each;
  int there = 0;  // the head whose queries are in shared memory
  const auto copy = [&](int h) {
    block.copy_queries(block.q(), p.f.q, heads + h, p.f.D);
    block.copy_queries(block.d_o(), p.f.d_o, heads + h, p.f.E);
    block.load_factors(heads + h);
  };
  const auto next = [&](int h) {
    if (h == there) return;
    there = h;
    __syncthreads();
    copy(h);
    cp_async_wait_all();
    block.rectify(block.q());
    __syncthreads();
  };
  block.copy_keys();
  copy(0);
  block.load_gates();
  {
    typename LinearChunk<Shape>::Loads prefix{}, suffix{};  // both loads in flight at once
    if (!block.is_first()) prefix = block.load_state(p.prefix, false);
    if (!block.is_last()) suffix = block.load_state(p.suffix, true);
    block.store_state(0, prefix);
    block.store_state(1, suffix);
  }
  cp_async_wait_all();
  block.rectify(block.q());
  block.rectify(block.k());
  __syncthreads();
  if (p.f.seen.keep) {
    block.hide_keys();
    __syncthreads();
  }
  for (int h = 0; h < each; ++h) {
    next(h);
    block.queries(heads + h);
  }
  // Back and forth over the heads: the last one is still in shared memory.
  block.keys(each, [&](int h, bool back) { next(back ? each - 1 - h : h); });
}

}  // namespace horner::attn::kernels::cuda

// Order 1, bf16: one thread block per chunk, which reads its keys once. Forward, and backward
//   dq_t = a_t (S g_t + b_t z) + sum_s (a_t g_t.v_s + dW_t) k_s,   b = dW / a
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
  using Base::kTokens, Base::LinearChunkTiles, Base::gates, Base::last;
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

  // x.y of the warp's row r (of each thread: lane / 4 + 8 r), in the thread's columns.
  __device__ float row_dot(Rows x, const Sums& y, int r) const {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 z =
          load_pair(bf16(), x.element(own + lane() / 4 + 8 * r, 8 * j + lane() % 4 * 2));
      sum += y[j][2 * r] * z.x + y[j][2 * r + 1] * z.y;
    }
    return sum;
  }
  // The same with the order-0 sums of state i, and these sums of z, in one of four lanes.
  __device__ float constant_dot(Rows x, int i, int r) const {
    float sum = 0;
    for (int j = 0; j < 16; ++j) {
      const int c = j / 2 * 8 + lane() % 4 * 2 + j % 2;
      sum += constant(i)[c] * load_element(bf16(), x.element(own + lane() / 4 + 8 * r, c));
    }
    return sum;
  }
  __device__ float constant_sum(int i) const { return lane() % 4 == 0 ? constant(i)[64] : 0; }

  // Sets dq to what the state before the chunk contributes, and `d_decay` to its weights of order 0
  // times their gradients.
  __device__ void apply_prefix_state(Sums& dq, const M::A (&a_frag)[4], const Query (&query)[2],
                                     float (&d_decay)[2]) const {
    float by[2], ratio[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // dW is 0 where a is 0
      by[r] = query[r].a * (Shape::kDecay ? query_decay(lane() / 4 + 8 * r) : 1);
      ratio[r] = query[r].a == 0 ? 0 : query[r].dW / query[r].a;
      if (Shape::kDecay && p.w.c[0] != 0)
        d_decay[r] = (constant_dot(d_o(), 0, r) + constant_sum(0) * ratio[r]) * by[r];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 z = column_pair(0, j);
#pragma unroll
      for (int n = 0; n < 4; ++n) dq[j][n] = (n % 2 ? z.y : z.x) * ratio[n / 2];
    }
    mma_abt_add(dq, a_frag, state(0), 0);
#pragma unroll
    for (int i = 0; i < 32; ++i) dq[i / 4][i % 4] *= by[i / 2 % 2];
  }
  // dq, and with decay the weights times their gradients: those of order 1 are q.dq.
  __device__ void queries(int head) const {
    const int real = f.T - first - own;
    const int64_t row = int64_t(b * f.H + head) * f.T + first + own;
    const bool sums_decay = Shape::kDecay && f.d_decay_key,
               has_constant = sums_decay && p.w.c[0] != 0;
    if (real <= 0) return;
    Query query[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = lane() / 4 + 8 * r;
      query[r] = f.queries[row + (t < real ? t : 0)];
    }
    M::A a_frag[4];
    load_a_operand(a_frag, d_o(), own);
    Sums dq = {};
    float d_decay[2] = {};
    if (!is_first()) apply_prefix_state(dq, a_frag, query, d_decay);
#pragma unroll 1
    for (int s = 0; s <= own; s += 16) {
      float x[2][4] = {};
      mma_abt_add(x, a_frag, v(), s);
      const Gates at = gates_of(own, s);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& y = x[i / 4][i % 4];
        const int r = i / 2 % 2;
        const bool hidden = s == own && is_above_diagonal(i / 4, i % 4);
        const float decay = Shape::kDecay ? decay_between(at.row[r], at.column[i / 4][i % 2]) : 1;
        if (has_constant && !hidden && is_kept(first + s + i / 4 * 8 + lane() % 4 * 2 + i % 2))
          d_decay[r] += (y * (query[r].a * p.w.c[0]) + query[r].dW * p.w.c[0]) * decay;
        y = y * (query[r].a * unit()) + query[r].dW * unit();  // as in add_queries, to the last bit
        if (Shape::kDecay) y *= decay;
        if (hidden) y = 0;
      }
      mma_ab_add(dq, M::to_a_operand(x, 0), k(), s);
    }
    const Rows of = q();
    if (sums_decay) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(d_decay[r] + row_dot(of, dq, r));
        const int t = lane() / 4 + 8 * r;
        if (lane() % 4 == 0 && t < real) *d_decay_at<bf16>(f, row + t) = sum;
      }
    }
    store(f.dq, row, f.D, real, dq, [](int) { return 1.f; }, &of);
  }

  // Adds the queries of the chunk to dv (`of_values`) or dk of the warp's sixteen keys; `d_decay`:
  // the weights of order 0 times their gradients.
  template <bool of_values>
  __device__ void add_queries(Sums& sums, float (&d_decay)[2]) const {
    const bool has_constant = Shape::kDecay && !of_values && p.w.c[0] != 0;
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
            if (has_constant && !hidden)
              d_decay[i / 2] += (x[j][i] * query.constant + query.constant_dW) * decay;
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
  __device__ float kept(int r) const { return is_kept(first + own + r) ? 1 : 0; }  // of a key
  // Given dk of the state after the chunk: sets `d_decay` to its weights of order 0 times their
  // gradients, and returns the sum of all orders, in the thread's columns.
  __device__ float crossing_end(const Sums& dk, float (&d_decay)[2]) const {
    float sum = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int s = lane() / 4 + 8 * r;
      if (p.w.c[0] != 0) d_decay[r] = (constant_dot(v(), 1, r) + constant_sum(1)) * key_decay(s);
      sum += (d_decay[r] + row_dot(k(), dk, r)) * kept(s);
    }
    return sum;
  }
  // The weights times their gradients: those of order 1 are k.dk.
  __device__ void store_decay(const Sums& dk, const float (&d_decay)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int s = own + lane() / 4 + 8 * r;
      const float sum = quad_sum(d_decay[r] + row_dot(k(), dk, r));
      if (lane() % 4 == 0 && first + s < f.S)
        f.d_decay_key[int64_t(key_head) * f.S + first + s] = -sum * kept(s - own);
    }
  }
  // dv and dk. Returns what `crossing_end` does.
  template <class Next>
  __device__ float keys(int each, const Next& next) const {
    const int s0 = first + own;
    float crossing = 0;
    const auto part = [&]<bool of_values>(std::bool_constant<of_values>, void* to, int channels) {
      const bool sums_decay = Shape::kDecay && !of_values && f.d_decay_key;
      Sums sums = {};
      float d_decay[2] = {};
      if (!is_last()) apply_suffix_state<of_values>(sums);
      if (sums_decay && !is_last()) crossing = crossing_end(sums, d_decay);
      for (int h = 0; h < each; ++h) {
        next(h, of_values);
        add_queries<of_values>(sums, d_decay);
      }
      if (sums_decay) store_decay(sums, d_decay);
      const Rows of = k();
      store(
          to, int64_t(key_head) * f.S + s0, channels, f.S - s0, sums,
          [&](int r) { return kept(r); }, of_values ? nullptr : &of);
    };
    part(std::true_type(), f.dv, f.E);
    part(std::false_type(), f.dk, f.D);
    return crossing;
  }
  // The gradient of the gate after the chunk, from this thread's part of it.
  __device__ void store_after(float crossing) const {
    __shared__ float of_warps[kTokens / 16];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) crossing += __shfl_xor_sync(~0u, crossing, step);
    if (lane() == 0) of_warps[warp()] = crossing;
    __syncthreads();
    if (threadIdx.x != 0) return;
    double sum = 0;
    for (int w = 0; w < kTokens / 16; ++w) sum += of_warps[w];
    p.d_after[int64_t(key_head) * p.chunks() + this->chunk] = sum;
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
  float crossing = 0;
  {
    typename LinearChunk<Shape>::Loads prefix{}, suffix{};  // both loads in flight at once
    if (!block.is_first()) prefix = block.load_state(p.prefix, false);
    if (!block.is_last()) suffix = block.load_state(p.suffix, true);
    block.store_state(0, prefix);
    block.store_state(1, suffix);
    if (Shape::kDecay && p.d_after) crossing = block.crossing(prefix, suffix);
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
  crossing += block.keys(each, [&](int h, bool back) { next(back ? each - 1 - h : h); });
  if (Shape::kDecay && p.d_after) block.store_after(crossing);
}

}  // namespace horner::attn::kernels::cuda

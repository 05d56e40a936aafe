// Kernels other than forward in which each thread block owns a block of queries and loops over the
// keys they see: dq without atomics here, the others in row_threshold.cuh.
#pragma once

#include "attn/kernels/cuda/common/scores.cuh"
#include "attn/kernels/cuda/common/special.cuh"

namespace horner::attn::kernels::cuda {

template <class T, int C>
struct QueriesShape {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kWarps = kWide && C == 256 ? 2 : 4, kThreads = 32 * kWarps;
  static constexpr int kQueries = 16 * kWarps;
  static constexpr int kKeys = kWide ? (C == 256 ? 16 : 32) : C == 256 ? 32 : 64;
  static constexpr int kTiles = kKeys / 8, kLanes = 2 * kTiles;
  static constexpr int kRowBytes = C * int(sizeof(T));
  static constexpr int kBytes = (2 * kQueries + 4 * kKeys) * kRowBytes;
};

// A block of queries of one head; each thread holds two rows, 0 and 1, which are 8 apart.
template <class T, int C>
struct QueryBlock {
  using Shape = QueriesShape<T, C>;
  static constexpr int n = Shape::kLanes;
  using Products = float[1][Shape::kTiles][4];

  const Fused& f;
  Head head;
  int t0;
  Tile<T, C> q, g, first_tile;

  __device__ QueryBlock(const Fused& f, const void* memory, bool with_gradient)
      : f(f),
        head(f, int(blockIdx.x)),
        t0(int(gridDim.y - 1 - blockIdx.y) * Shape::kQueries),
        q{shared_address(memory)},
        g{q.at + Shape::kQueries * Shape::kRowBytes},
        first_tile{g.at + Shape::kQueries * Shape::kRowBytes} {
    const auto [b, h, key_head] = head;
    copy_rows<Shape::kQueries, Shape::kThreads>(q, row_of<T>(f.q, b, h, t0), f.q.row, f.T - t0,
                                                f.D);
    if (with_gradient)
      copy_rows<Shape::kQueries, Shape::kThreads>(g, row_of<T>(f.d_o, b, h, t0), f.d_o.row,
                                                  f.T - t0, f.E);
  }
  // Of queries in a tile `q` that others copy.
  __device__ QueryBlock(const Fused& f, Head head, int t0, Tile<T, C> q)
      : f(f), head(head), t0(t0), q(q), g{}, first_tile{} {}
  __device__ int query(int i) const { return t0 + warp() * 16 + i * 8 + lane() / 4; }
  __device__ int64_t row(int i) const { return head.row(f, min(query(i), f.T - 1)); }
  static __device__ Vec<n> of_row(const Products& x, int i) {
    return vec<n>([&](int j) { return x[0][j / 2][i * 2 + j % 2]; });
  }
  // The key of the thread's element j, in a tile that starts at s0.
  static __device__ int key(int s0, int j) { return s0 + lane() % 4 * 2 + j / 2 * 8 + j % 2; }

  // The scores of row i, -inf where masked.
  __device__ Vec<n> scores(const Products& x, int i, int s0) const {
    const uint32_t seen = seen_keys<n>(f, head.b, query(i), key(s0, 0));
    const float centre = centre_of(f, head, query(i)), most = last_clamp(f);
    auto y = of_row(x, i);
    if (changes_scores(f)) change_row(y, i, s0);
    return vec<n>(
        [&](int j) { return seen >> j & 1 ? min_nan(y[j] * f.scale - centre, most) : -INFINITY; });
  }
  // From products to changed scores, in units of q.k; returns the slope of each, 0 at the clamp.
  __device__ Vec<n> change_row(Vec<n>& x, int i, int s0) const {
    const float centre = centre_of(f, head, query(i)), per = 1 / (f.scale * kLog2e);
    const double here = f.decay_in_scores ? gates_at_query(f, head, query(i)) : 0;
    return vec<n>([&](int j) {
      const float bias = bias_of(f, head, query(i), key(s0, j));
      const ChangedScore y = changed_score<T>(f, x[j], bias, centre);
      x[j] = y.x;
      if (f.decay_in_scores)
        x[j] = with_log2_decay(y.x, log2_decay(here, gates_at_key(f, head, key(s0, j))), per);
      return y.live ? y.slope : 0;
    });
  }
  // The decay of each key, 0 where its bit in `seen` is not set.
  __device__ Vec<n> decay_factors(int i, int s0, uint32_t seen) const {
    const double here = gates_at_query(f, head, query(i));
    return vec<n>([&](int j) {
      return seen >> j & 1 ? decay_factor(here, gates_at_key(f, head, key(s0, j))) : 0;
    });
  }

  // Zeroes the elements of dropped pairs.
  __device__ void drop(Vec<n>& x, int i, int s0) const {
    if (!f.dropout.seed) return;
    const DropoutRow row = dropout_row(dropout_head(f, head), query(i));
    x = vec<n>([&](int j) { return is_dropped(f, row, key(s0, j)) ? 0 : x[j]; });
  }

  // Calls each(s0, x, dp, k) for every tile of keys: x = q.k, and if `Values` dp = g.v, v gated.
  template <bool Values, class F>
  __device__ void over_keys(const F& each) const {
    constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads;
    const auto tiles = key_tiles<kKeys>(f, head.b, t0, min(t0 + Shape::kQueries, f.T) - 1);
    const int begin = tiles.begin, end = tiles.end;
    const auto tile = [&](int i) {
      return Tile<T, C>{first_tile.at + i * kKeys * Shape::kRowBytes};
    };
    const auto copy = [&](int s0, int stage) {
      copy_rows<kKeys, kThreads>(tile(2 * stage), row_of<T>(f.k, head.b, head.g, s0), f.k.row,
                                 f.S - s0, f.D);
      if (Values)
        copy_rows<kKeys, kThreads>(tile(2 * stage + 1), row_of<T>(f.v, head.b, head.g, s0), f.v.row,
                                   f.S - s0, f.E);
    };
    __syncthreads();  // all warps are done with the previous pass
    if (begin < end) copy(begin, 0);
    int stage = 0;
    for (int s0 = begin; s0 < end; s0 = tiles.after(s0), stage ^= 1) {
      cp_async_wait_all();
      if (Values && f.gate) gate_values<kKeys, kThreads>(f, head, s0, tile(2 * stage + 1));
      __syncthreads();
      if (tiles.after(s0) < end) copy(tiles.after(s0), stage ^ 1);
      Products x, dp = {};
      mma_abt<T>(x, q, warp() * 16, tile(2 * stage), 0);
      if (Values) mma_abt<T>(dp, g, warp() * 16, tile(2 * stage + 1), 0);
      each(s0, x, dp, tile(2 * stage));
    }
    cp_async_wait_all();
  }
};

// dq and the gradients of the centre and of the queries' decay. One warp owns each row: bitwise
// deterministic.
template <class T, int C, class W>
__global__ __launch_bounds__(QueriesShape<T, C>::kThreads) void fused_dq_kernel(
    const __grid_constant__ Fused f, const __grid_constant__ W w) {
  using Block = QueryBlock<T, C>;
  constexpr int n = Block::n;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Block block(f, memory, true);
  float dq[1][C / 8][4] = {};
  float d_centre[2] = {};
  DecaySum<T> d_decay[2] = {};
  Query query[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    query[i] = f.queries[block.row(i)];
    if (block.query(i) >= f.T) query[i].a = query[i].dW = 0;
  }
  block.template over_keys<true>([&](int s0, auto& x, auto& dp, Tile<T, C> k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto y = Block::of_row(x, i);
      Vec<n> slopes = vec<n>([](int) { return 1.0f; });
      if (changes_scores(f)) slopes = block.change_row(y, i, s0);
      Scores<n> s;
      s.z = vec<n>([&](int j) {
        if constexpr (sizeof(T) == 2) return y[j] * f.scale * kUnit<W> - query[i].sub;
        return shifted<T, W>(y[j], f.scale, query[i].sub);
      });
      s.limit = vec<n>([&](int) { return query[i].limit; });
      s.dp = Block::of_row(dp, i);
      block.drop(s.dp, i, s0);
      s.a = vec<n>([&](int) { return query[i].a; });
      s.dW = vec<n>([&](int) { return query[i].dW; });
      s.seen = seen_keys<n>(f, block.head.b, block.query(i), Block::key(s0, 0));
      if (f.decay && !f.decay_in_scores) {
        const auto decay = block.decay_factors(i, s0, s.seen);
        s.a = s.a * decay, s.dW = s.dW * decay;
      }
      ScoreGradients<n> gradients;
      with_degree(w, slope_degree_of(w), [&](const auto& weight) {
        gradients =
            score_gradients<Path::general, n>(weight, f, s, [&](int) { return block.row(i); });
      });
#pragma unroll
      for (int j = 0; j < n; ++j) {
        if (f.d_decay_key) d_decay[i] += gradients.w[j] * (s.a[j] * s.dp[j] + s.dW[j]);
        x[0][j / 2][i * 2 + j % 2] = gradients.dx[j] * slopes[j];
        d_centre[i] -= slopes[j] == 0 ? 0 : gradients.dx[j];
      }
    }
    mma_ab_rs<T>(dq, x, k, 0);
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float centre = quad_sum(d_centre[i]);
    DecaySum<T> decay = d_decay[i];
    for (int step = 1; step < 4; step *= 2) decay += __shfl_xor_sync(~0u, decay, step);
    if (block.query(i) >= f.T) continue;
    const int64_t at = block.row(i);
    if (f.d_centre && lane() % 4 == 0) f.d_centre[at] = centre;
    if (f.d_decay_key && lane() % 4 == 0) *d_decay_at<T>(f, at) = decay;
#pragma unroll
    for (int j = 0; j < C / 8; ++j) {
      const int c = 8 * j + lane() % 4 * 2;
      const float* y = dq[0][j] + i * 2;
      if (c < f.D) store_pair<T>(f.dq, at * f.D + c, y[0] * f.scale, y[1] * f.scale);
    }
  }
}

}  // namespace horner::attn::kernels::cuda

// Stick breaking in log space. With kept = log(1 - sigmoid(x)) and own = log sigmoid(x),
//   w_s = e^(own_s + sum_{r > s} kept_r),   N = sum_s w_s v_s
// and with dl_s = w_s dw_s, dw the gradient of a weight,
//   dx_s = dl_s (1 - sigmoid(x_s)) - sigmoid(x_s) sum_{r < s} dl_r.
// Forward goes from the last tile of keys to the first, with the running sum of `kept`. Backward
// sweeps from the first to the last, `kStickTiles` tiles at a time: the kernel that owns queries
// writes dq and, for every row and tile, both running sums, from which the kernel that owns keys
// writes dk and dv. The sums over tiles are doubles: the whole less a part is then exact enough.
#pragma once

#include "attn/kernels/cuda/fused/queries.cuh"
#include "attn/kernels/cuda/fused/stick.h"

namespace horner::attn::kernels::cuda {

// For each column of a thread's row, the sum over the columns after it, or before it, in the tile;
// `total` is that of all. Called by all lanes.
template <bool after, int n>
__device__ __forceinline__ Vec<n> scan_row(const Vec<n>& x, float& total) {
  const int c = lane() % 4;
  constexpr int kFirst = after,
                kSecond = !after;  // of two adjacent columns, in the order of the scan
  Vec<n> y;
  total = 0;
#pragma unroll
  for (int i = 0; i < n / 2; ++i) {
    const int j = 2 * (after ? n / 2 - 1 - i : i);
    float sum = x[j] + x[j + 1];
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other =
          after ? __shfl_down_sync(~0u, sum, step, 4) : __shfl_up_sync(~0u, sum, step, 4);
      if (after ? c + step < 4 : c >= step) sum += other;
    }
    const float beside = after ? __shfl_down_sync(~0u, sum, 1, 4) : __shfl_up_sync(~0u, sum, 1, 4);
    y[j + kFirst] = total + (c == (after ? 3 : 0) ? 0 : beside);
    y[j + kSecond] = y[j + kFirst] + x[j + kFirst];
    total += __shfl_sync(~0u, sum, after ? 0 : 3, 4);
  }
  return y;
}

// From scores to weights; `left` is the log of the stick that the keys after the tile leave.
// Returns the sum of `kept` over the tile. A hidden key, with a score of -inf, leaves the stick as
// it is.
template <int n>
__device__ __forceinline__ float log_kept(const Vec<n>& x, Vec<n>& after, Vec<n>& own) {
  Vec<n> kept;
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float l = log1pf(expf(-fabsf(x[j])));
    kept[j] = -l - fmaxf(x[j], 0), own[j] = fminf(x[j], 0) - l;
  }
  float total;
  after = scan_row<true>(kept, total);
  return total;
}
template <int n>
__device__ __forceinline__ Vec<n> stick_weights(const Vec<n>& after, const Vec<n>& own,
                                                float left) {
  return vec<n>([&](int j) { return expf(own[j] + (after[j] + left)); });
}
// The score gradients from dl; `before` is the sum of dl over the keys before the tile. Returns the
// sum over the tile.
template <int n>
__device__ __forceinline__ float stick_gradients(const Vec<n>& x, const Vec<n>& dl, float before,
                                                 Vec<n>& dx) {
  float total;
  const auto earlier = scan_row<false>(dl, total);
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float e = expf(-fabsf(x[j])), more = 1 / (1 + e), less = e * more;
    const float yes = x[j] > 0 ? more : less, no = x[j] > 0 ? less : more;
    dx[j] = dl[j] * no - yes * (earlier[j] + before);
  }
  return total;
}
// Of the scores by scale q.k: of the soft cap, and 0 at the clamp.
template <class Block, class Products>
__device__ __forceinline__ Vec<Block::n> score_slopes(const Block& block, const Products& x, int i,
                                                      int s0) {
  auto y = Block::of_row(x, i);
  if (changes_scores(block.f)) return block.change_row(y, i, s0);
  return vec<Block::n>([&](int j) { return y[j] * block.f.scale < block.f.clamp ? 1.0f : 0.0f; });
}

// The gradients of the weights in N, 0 for dropped pairs.
template <class Block, class Products>
__device__ __forceinline__ Vec<Block::n> numerator_gradients(const Block& block, const Products& dp,
                                                             int i, int s0) {
  auto d = Block::of_row(dp, i);
  block.drop(d, i, s0);
  return d * block.f.dropout.kept;
}
// The tiles of keys that some query of the block sees, and those between them.
template <class T, int C>
__device__ inline KeyTiles<QueriesShape<T, C>::kKeys> stick_keys(const QueryBlock<T, C>& block) {
  using Shape = QueriesShape<T, C>;
  const int last = min(block.t0 + Shape::kQueries, block.f.T) - 1;
  return key_tiles<Shape::kKeys>(block.f, block.head.b, block.t0, last);
}

// Calls each(s0, k, v) for the tiles of keys of [begin, end), from the first one on or `down`.
template <bool down, class T, int C, class F>
__device__ void over_tiles(const QueryBlock<T, C>& block, int begin, int end, const F& each) {
  using Shape = QueriesShape<T, C>;
  constexpr int kKeys = Shape::kKeys;
  const Fused& f = block.f;
  const Head& head = block.head;
  const int tiles = (end - begin + kKeys - 1) / kKeys;
  const auto start = [&](int i) { return begin + (down ? tiles - 1 - i : i) * kKeys; };
  const auto tile = [&](int i) {
    return Tile<T, C>{block.first_tile.at + i * kKeys * Shape::kRowBytes};
  };
  const auto copy = [&](int s0, int stage) {
    copy_rows<kKeys, Shape::kThreads>(tile(2 * stage), row_of<T>(f.k, head.b, head.g, s0), f.k.row,
                                      f.S - s0, f.D);
    copy_rows<kKeys, Shape::kThreads>(tile(2 * stage + 1), row_of<T>(f.v, head.b, head.g, s0),
                                      f.v.row, f.S - s0, f.E);
  };
  if (tiles > 0) copy(start(0), 0);
  for (int i = 0; i < tiles; ++i) {
    cp_async_wait_all();
    __syncthreads();  // this tile has arrived; all warps are done with the last one
    if (i + 1 < tiles) copy(start(i + 1), (i + 1) % 2);
    each(start(i), tile(i % 2 * 2), tile(i % 2 * 2 + 1));
  }
  cp_async_wait_all();
}

// Entropy, largest, first and negative of a thread's row, whose weights sum to `sum`.
struct StickStatistics {
  float moment = 0, most = 0, first = 0;

  template <int n, class Key>
  __device__ void add(const Vec<n>& w, int start, const Key& key) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
      moment += w[j] > 0 ? w[j] * logf(w[j]) : 0;
      most = fmaxf(most, w[j]);
      if (key(j) == start) first = w[j];
    }
  }
  __device__ void write(const Fused& f, int64_t row, bool wanted, float sum) {
    const float per = sum > 0 ? 1 / sum : 0, entropy = quad_sum(moment);
    const float values[4] = {sum > 0 ? logf(sum) - entropy * per : 0, quad_max(most) * per,
                             quad_sum(first) * per, 0};
    const int64_t rows = int64_t(f.B) * f.H * f.T;
    if (!wanted || lane() % 4 != 0) return;
    for (int i = 0; i < 4; ++i) f.statistics[i * rows + row] = values[i];
  }
};

template <class T, int C>
__global__ __launch_bounds__(QueriesShape<T, C>::kThreads) void stick_forward_kernel(
    const __grid_constant__ Sticks p) {
  using Block = QueryBlock<T, C>;
  using Shape = QueriesShape<T, C>;
  constexpr int n = Block::n;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Fused& f = p.f;
  const Block block(f, memory, false);
  const auto [begin, end] = stick_keys(block);
  float N[1][C / 8][4] = {};
  float sum[2] = {};
  double left[2] = {};
  StickStatistics statistics[2];
  over_tiles<true>(block, begin, end, [&](int s0, Tile<T, C> k, Tile<T, C> v) {
    typename Block::Products x;
    mma_abt<T>(x, block.q, warp() * 16, k, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Vec<n> after, own;
      const float kept = log_kept(block.scores(x, i, s0), after, own);
      auto w = stick_weights(after, own, float(left[i]));
      left[i] += kept;
      if (f.statistics)
        statistics[i].add(w, first_key(f, min(block.query(i), f.T - 1)),
                          [&](int j) { return Block::key(s0, j); });
#pragma unroll
      for (int j = 0; j < n; ++j) sum[i] += w[j];
      block.drop(w, i, s0);
#pragma unroll
      for (int j = 0; j < n; ++j) x[0][j / 2][i * 2 + j % 2] = w[j];
    }
    mma_ab_rs<T>(N, x, v, 0);
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float W = quad_sum(sum[i]);
    const int64_t at = block.row(i);
    const bool wanted = block.query(i) < f.T;
    if (f.statistics) statistics[i].write(f, at, wanted, W);
    if (!wanted) continue;
    if (lane() % 4 == 0) p.W[at] = W, p.left[at] = left[i];
#pragma unroll
    for (int j = 0; j < C / 8; ++j) {
      const int c = 8 * j + lane() % 4 * 2;
      const float* y = N[0][j] + i * 2;
      const float kept = f.dropout.kept;
      if (c < f.E) store_pair<float>(p.N, at * f.E + c, y[0] * kept, y[1] * kept);
    }
  }
}

// dq, and the states of the sweep's tiles. One thread block owns each row: deterministic.
template <class T, int C>
__global__ __launch_bounds__(QueriesShape<T, C>::kThreads) void stick_dq_kernel(
    const __grid_constant__ Sticks p) {
  using Block = QueryBlock<T, C>;
  using Shape = QueriesShape<T, C>;
  constexpr int n = Block::n, kKeys = Shape::kKeys;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Fused& f = p.f;
  const Block block(f, memory, true);
  const KeyTiles<kKeys> keys = stick_keys(block);
  const int begin = max(keys.begin, p.first * kKeys);
  const int end = min(keys.end, (p.first + kStickTiles) * kKeys);
  if (begin >= end) return cp_async_wait_all();
  float dq[1][C / 8][4] = {};
  double left[2], before[2];  // of the keys from this tile on; of those before it
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const double* const swept = p.swept + 2 * block.row(i);
    left[i] = p.left[block.row(i)] - swept[0], before[i] = swept[1];
  }
  over_tiles<false>(block, begin, end, [&](int s0, Tile<T, C> k, Tile<T, C> v) {
    typename Block::Products x, dp;
    mma_abt<T>(x, block.q, warp() * 16, k, 0);
    mma_abt<T>(dp, block.g, warp() * 16, v, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto score = block.scores(x, i, s0), slope = score_slopes(block, x, i, s0);
      const float dW = p.dW[block.row(i)];
      Vec<n> after, own, dx;
      left[i] -= log_kept(score, after, own);
      const float2 state = make_float2(float(left[i]), float(before[i]));
      if (lane() % 4 == 0 && block.query(i) < f.T)
        reinterpret_cast<float2*>(p.states)[block.row(i) * kStickTiles + s0 / kKeys - p.first] =
            state;
      const auto dl =
          stick_weights(after, own, state.x) * (numerator_gradients(block, dp, i, s0) + dW);
      before[i] += stick_gradients(score, dl, state.y, dx);
#pragma unroll
      for (int j = 0; j < n; ++j) x[0][j / 2][i * 2 + j % 2] = dx[j] * slope[j];
    }
    mma_ab_rs<T>(dq, x, k, 0);
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t at = block.row(i);
    if (block.query(i) >= f.T) continue;
    if (lane() % 4 == 0) {
      p.swept[2 * at] = p.left[at] - left[i];
      p.swept[2 * at + 1] = before[i];
    }
#pragma unroll
    for (int j = 0; j < C / 8; ++j) {
      const int c = 8 * j + lane() % 4 * 2;
      float2* const to = reinterpret_cast<float2*>(p.dq + at * f.D + c);
      const float* y = dq[0][j] + i * 2;
      if (c < f.D) *to = make_float2(to->x + y[0] * f.scale, to->y + y[1] * f.scale);
    }
  }
}

// A thread block owns a tile of keys, and some of their channels.
template <class T, int C>
struct StickKeysShape : QueriesShape<T, C> {
  using Base = QueriesShape<T, C>;
  static constexpr int kOwn = C < 128 ? C : 128, kParts = C / kOwn;
  static constexpr int kAtoms = Base::kKeys / 16, kSharing = Base::kWarps / kAtoms;
  static constexpr int kChannels = kOwn / kSharing;  // of a warp
  static constexpr int kScoreBytes = Base::kQueries * Base::kKeys * int(sizeof(T));
  static constexpr int kBytes =
      2 * (Base::kQueries + Base::kKeys) * Base::kRowBytes + 2 * kScoreBytes;
};

template <class T, int C>
__global__ __launch_bounds__(QueriesShape<T, C>::kThreads) void stick_keys_kernel(
    const __grid_constant__ Sticks p) {
  using Block = QueryBlock<T, C>;
  using Shape = StickKeysShape<T, C>;
  using Fragments = typename Mma<T>::Rounded[Shape::kTiles];
  constexpr int n = Block::n, kKeys = Shape::kKeys, kQueries = Shape::kQueries;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Fused& f = p.f;
  const int b = int(blockIdx.x) / f.G, g = int(blockIdx.x) % f.G, each = f.H / f.G;
  const int tile = int(blockIdx.y) / Shape::kParts, s0 = (p.first + tile) * kKeys;
  const int part = int(blockIdx.y) % Shape::kParts;
  const int own = warp() % Shape::kAtoms * 16;  // first key of the warp, and its first channel
  const int channel = part * Shape::kOwn + warp() / Shape::kAtoms * Shape::kChannels;
  const Tile<T, C> q{shared_address(memory)}, grad{q.at + kQueries * Shape::kRowBytes};
  const Tile<T, C> k{grad.at + kQueries * Shape::kRowBytes}, v{k.at + kKeys * Shape::kRowBytes};
  const Tile<T, kKeys> dx_tile{v.at + kKeys * Shape::kRowBytes};
  const Tile<T, kKeys> w_tile{dx_tile.at + Shape::kScoreBytes};
  const typename Mma<T>::template Writer<kKeys> to_dx(dx_tile, warp() * 16),
      to_w(w_tile, warp() * 16);
  copy_rows<kKeys, Shape::kThreads>(k, row_of<T>(f.k, b, g, s0), f.k.row, f.S - s0, f.D);
  copy_rows<kKeys, Shape::kThreads>(v, row_of<T>(f.v, b, g, s0), f.v.row, f.S - s0, f.E);
  float dk[1][Shape::kChannels / 8][4] = {}, dv[1][Shape::kChannels / 8][4] = {};
  const VisibleRange visible = queries_that_see(f, b, s0, s0 + kKeys);
  const int begin = visible.some_begin / kQueries * kQueries, end = visible.some_end;
  for (int h = g * each; h < (g + 1) * each; ++h)
    for (int t0 = begin; t0 < end; t0 += kQueries) {
      const Block block(f, Head(b, h, g), t0, q);
      __syncthreads();  // all warps are done with the last queries
      copy_rows<kQueries, Shape::kThreads>(q, row_of<T>(f.q, b, h, t0), f.q.row, f.T - t0, f.D);
      copy_rows<kQueries, Shape::kThreads>(grad, row_of<T>(f.d_o, b, h, t0), f.d_o.row, f.T - t0,
                                           f.E);
      cp_async_wait_all();
      __syncthreads();
      typename Block::Products x, dp;
      mma_abt<T>(x, q, warp() * 16, k, 0);
      mma_abt<T>(dp, grad, warp() * 16, v, 0);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto score = block.scores(x, i, s0), slope = score_slopes(block, x, i, s0);
        const float2 state =
            reinterpret_cast<const float2*>(p.states)[block.row(i) * kStickTiles + tile];
        Vec<n> after, own_log, dx;
        log_kept(score, after, own_log);
        auto w = stick_weights(after, own_log, state.x);
        const auto dw = numerator_gradients(block, dp, i, s0) + p.dW[block.row(i)];
        stick_gradients(score, w * dw, state.y, dx);
        block.drop(w, i, s0);
#pragma unroll
        for (int j = 0; j < n; ++j)
          x[0][j / 2][i * 2 + j % 2] = dx[j] * slope[j],
                                  dp[0][j / 2][i * 2 + j % 2] = w[j] * f.dropout.kept;
      }
      Fragments dx, w;
#pragma unroll
      for (int j = 0; j < Shape::kTiles; ++j)
        dx[j] = Mma<T>::rounded(x[0][j]), w[j] = Mma<T>::rounded(dp[0][j]);
#pragma unroll
      for (int j = 0; j < Shape::kTiles; j += 2)
        to_dx.put(0, 8 * j, dx + j), to_w.put(0, 8 * j, w + j);
      __syncthreads();
      mma_atb<kQueries, true>(dk, dx_tile, own, q, channel);
      mma_atb<kQueries, true>(dv, w_tile, own, grad, channel);
    }
  cp_async_wait_all();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int s = s0 + own + i * 8 + lane() / 4;
    if (s >= f.S) continue;
    const int64_t at = Head(b, g * each, g).key(f, s);
#pragma unroll
    for (int j = 0; j < Shape::kChannels / 8; ++j) {
      const int c = channel + 8 * j + lane() % 4 * 2;
      const float *y = dk[0][j] + i * 2, *z = dv[0][j] + i * 2;
      if (c < f.D) store_pair<T>(f.dk, at * f.D + c, y[0] * f.scale, y[1] * f.scale);
      if (c < f.E) store_pair<T>(f.dv, at * f.E + c, z[0], z[1]);
    }
  }
}

}  // namespace horner::attn::kernels::cuda

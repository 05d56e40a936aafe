// From products of a warp's keys with a tile of queries to weights times a and score gradients,
// rounded: the A operands of key_gradients.cuh.
#pragma once

#include "attn/kernels/cuda/common/scores.cuh"
#include "attn/kernels/cuda/common/special.cuh"

namespace horner::attn::kernels::cuda {

// If two warps share their keys, each computes the scores of half of the queries.
template <class T, int C, class W, class Shape>
struct KeyScoreGradients {
  static constexpr int kAtoms = Shape::kAtoms, kTiles = Shape::kStep / 8;
  static constexpr int kSharing = 16 * kAtoms * Shape::kWarps / Shape::kKeys;
  static constexpr int kPart = Shape::kQueries / kSharing, kChannels = Shape::kOwn / kSharing;
  static constexpr bool kIsExp = std::is_same_v<W, Exp>;
  static constexpr bool kOverlaps = kHasDecayFactors<T, W> && C <= 128;
  using Products = float[kAtoms][kTiles][4];
  using Fragments = typename Mma<T>::Rounded[kAtoms][kTiles];

  const Fused& f;
  const W& w;
  int s0, own;           // first key of the block, and of the warp within it
  int part, column;      // index of the sharing warp; first channel accumulated here
  VisibleRange visible;  // queries that see the warp's keys
  double d_decay[kAtoms][2];
  float factor[2 * kAtoms];  // decay factor of each key if `factored`, other than for exp

  // A tile of queries of one head, in shared memory.
  struct Queries {
    Head head;
    int t0;
    Tile<T, C> q, g;
    const Query* of;      // [kQueries]
    const double* gates;  // [kQueries]
    Tile<T, Shape::kQueries> dx, w;
    bool after_keys = false;  // if `factored`: every query is after the block's keys
  };

  __device__ KeyScoreGradients(const Fused& f, const W& w, int s0, int first)
      : f(f),
        w(w),
        s0(s0),
        own(warp() / kSharing * 16 * kAtoms),
        part(warp() % kSharing),
        column(first + part * kChannels),
        visible(queries_that_see(f.seen, s0 + own, s0 + own + 16 * kAtoms)),
        d_decay{} {}
  __device__ int key(int i) const {  // of the thread's row i
    return s0 + own + i / 2 * 16 + i % 2 * 8 + lane() / 4;
  }

  // If `factored`: log2 decay relative to the block's last key.
  __device__ float log2_decay_to(double gates, const Head& head) const {
    return log2_decay(gates, gates_at_key(f, head, min(s0 + Shape::kKeys, f.S) - 1));
  }
  __device__ float key_log2_decay(int i, const Head& head) const {
    return log2_decay_to(gates_at_key(f, head, key(i)), head);
  }
  __device__ void set_key_factors(const Head& head) {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i)
      factor[i] = f.decay && !kIsExp ? exp2_fast(-key_log2_decay(i, head)) : 1;
  }

  // Whether some score of the warp may exceed the clamp; polynomials assume so.
  __device__ __forceinline__ bool clamps(const Products& x) const {
    if (!kIsExp || !(f.clamp < INFINITY)) return f.clamp < INFINITY;
    const float most = __fdividef(f.clamp, f.scale);
    bool above = f.centre || f.clamp <= 0;
#pragma unroll
    for (int i = 0; i < kAtoms * kTiles * 4; ++i)
      above |= !(x[i / (4 * kTiles)][i / 4 % kTiles][i % 4] < most * 0.9999f);
    return __any_sync(~0u, above);
  }
  // One bit per element of the thread: whether its query, t or t + 1, sees its kept key.
  __device__ __forceinline__ uint32_t seen_by_two(int t, uint32_t kept) const {
    uint32_t bits = 0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int lo = f.seen.lo(min(t + c, f.T - 1)), hi = f.seen.hi(min(t + c, f.T - 1));
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i)
        bits |= uint32_t(key(i) >= lo && key(i) < hi && kept >> i & 1) << (2 * i + c);
    }
    return bits;
  }
  __device__ __forceinline__ uint32_t seen_by_two(const Head& head, int t, uint32_t kept) const {
    if constexpr (kIsSpecial<Shape>) {
      uint32_t bits = 0;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const KeysOfQuery keys(f, head.b, min(t + c, f.T - 1));
#pragma unroll
        for (int i = 0; i < 2 * kAtoms; ++i)
          bits |= uint32_t(keys.has(key(i)) && kept >> i & 1) << (2 * i + c);
      }
      return bits;
    } else {
      return seen_by_two(t, kept);
    }
  }
  // Zeroes elements whose query does not see the key.
  __device__ __forceinline__ void hide(const Queries& tile, int at, Fragments& aw,
                                       Fragments& dx) const {
    const uint32_t kept = f.seen.keep ? kept_keys(tile.head.b) : ~0u;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const uint32_t seen = seen_by_two(tile.t0 + at + 8 * j + lane() % 4 * 2, kept);
#pragma unroll
      for (int i = 0; i < kAtoms; ++i)
        Mma<T>::keep(aw[i][j], seen >> 4 * i), Mma<T>::keep(dx[i][j], seen >> 4 * i);
    }
  }
  __device__ uint32_t kept_keys(int b) const {  // one bit per row of the thread
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i)
      if (f.seen.keep[int64_t(b) * f.S + min(key(i), f.S - 1)]) bits |= 1u << i;
    return bits;
  }
  // One bit per element of a few tiles: whether its pair stays. `first` is the thread's first query
  // among those of `rows`, `row(i)` the key of element i.
  template <int n, int tiles, class Row>
  __device__ __forceinline__ uint32_t staying(const DropoutLanes& rows, int first,
                                              const Row& row) const {
    if (!f.dropout.seed) return ~0u;
    DropoutRow of[2 * tiles];
#pragma unroll
    for (int c = 0; c < 2 * tiles; ++c) of[c] = rows.of(first + c / 2 * 8 + c % 2);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < n; ++i)
      bits |= uint32_t(!is_dropped(f, of[i / 4 % tiles * 2 + i % 2], key(row(i)))) << i;
    return bits;
  }
  struct NoDropout {};
  __device__ __forceinline__ auto dropout_of(const Queries& tile, int at) const {
    if constexpr (kIsSpecial<Shape>)
      return DropoutLanes(f, tile.head, tile.t0 + at);
    else
      return NoDropout{};
  }
  template <int n>
  static __device__ __forceinline__ Vec<n> only(uint32_t bits, const Vec<n>& x) {
    return vec<n>([&](int i) { return bits >> i & 1 ? x[i] : 0; });
  }
  // From products to weights times a and score gradients, kTilesPerStep tiles at a time.
  template <Path path, class Weight>
  __device__ __forceinline__ void tile_gradients(const Weight& weight, const Queries& tile, int at,
                                                 Products& x, Products& dp, Fragments& aw,
                                                 Fragments& dx) {
    constexpr bool raw = kIsFixedDegree<Weight>;  // of unscaled products
    const float per_scale = raw && path != Path::plain ? 1 / f.scale : 1;
    constexpr int kTilesPerStep = Shape::kTilesPerStep, n = 4 * kTilesPerStep * kAtoms;
    const auto dropout = dropout_of(tile, at);
    // Element i of a step: its tile, column (query) and row (key).
#pragma unroll
    for (int j = 0; j < kTiles; j += kTilesPerStep) {
      const auto tile_of = [](int i) { return i / 4 % kTilesPerStep; };
      const auto column_of = [&](int i) {
        return at + (j + tile_of(i)) * 8 + lane() % 4 * 2 + i % 2;
      };
      const auto row_of = [](int i) { return i / (4 * kTilesPerStep) * 2 + i / 2 % 2; };
      const auto element = [&](Products& y, int i) -> float& {
        return y[i / (4 * kTilesPerStep)][j + tile_of(i)][i % 4];
      };
      Query query[2 * kTilesPerStep];  // one per column
#pragma unroll
      for (int c = 0; c < 2 * kTilesPerStep; ++c) query[c] = tile.of[column_of(c / 2 * 4 + c % 2)];
      const auto of = [&](int i) -> const Query& { return query[tile_of(i) * 2 + i % 2]; };
      Scores<n> s;
      s.z = vec<n>([&](int i) {
        return raw ? element(x, i) : shifted<T, W>(element(x, i), f.scale, of(i).sub);
      });
      s.limit = vec<n>([&](int i) { return of(i).limit * per_scale; });
      Changes<n> changes;
      if (path == Path::general && changes_scores(f))
        s.z = changes.scores(
            *this, tile, column_of, row_of, [&](int i) { return element(x, i); },
            [&](int i) { return of(i).sub; });
      s.dp = vec<n>([&](int i) { return element(dp, i); });
      uint32_t stay = ~0u;
      if constexpr (kIsSpecial<Shape>) {
        stay = staying<n, kTilesPerStep>(dropout, column_of(0) - at, row_of);
        s.dp = only(stay, s.dp);
      }
      s.a = vec<n>([&](int i) { return of(i).a; });
      s.dW = vec<n>([&](int i) { return of(i).dW; });
      s.seen = ~0u;
      if constexpr (path == Path::general) {
        s.seen = 0;
        const uint32_t kept = f.seen.keep ? kept_keys(tile.head.b) : ~0u;
#pragma unroll
        for (int i = 0; i < kTilesPerStep * kAtoms; ++i) {
          const uint32_t two =
              seen_by_two(tile.head, tile.t0 + column_of(i % kTilesPerStep * 4), kept);
          s.seen |= (two >> i / kTilesPerStep * 4 & 15) << 4 * i;
        }
      }
      if (path == Path::general && f.decay && !f.decay_in_scores) {
        const auto decay = vec<n>([&](int i) {
          const double at_key = gates_at_key(f, tile.head, key(row_of(i)));
          return s.seen >> i & 1 ? decay_factor(tile.gates[column_of(i)], at_key) : 0;
        });
        s.a = s.a * decay, s.dW = s.dW * decay;
      }
      ScoreGradients<n> y = score_gradients<path, n>(weight, f, s, [&](int i) {
        return tile.head.row(f, min(tile.t0 + column_of(i), f.T - 1));
      });
      if (path == Path::general && changes_scores(f))
        changes.gradients(*this, tile, column_of, row_of, y.dx);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const bool stays = !kIsSpecial<Shape> || stay >> i & 1;
        element(x, i) = stays ? y.w[i] * s.a[i] : 0, element(dp, i) = y.dx[i];
      }
#pragma unroll
      for (int i = 0; i < kAtoms * kTilesPerStep; ++i) {
        const int atom = i / kTilesPerStep, column = j + i % kTilesPerStep;
        aw[atom][column] = Mma<T>::rounded(x[atom][column]);
        dx[atom][column] = Mma<T>::rounded(dp[atom][column]);
      }
      if (path == Path::general && f.d_decay_key) add_decay(tile, column_of(0), s, y);
      // The centre is subtracted from its query's scores.
      if (path == Path::general && f.d_centre && adds_rows())
        over_queries(tile, column_of(0), y.dx,
                     [&](int64_t row, double sum) { atomicAdd(f.d_centre + row, float(-sum)); });
    }
  }
  // The same, overlapped with the products dp: weights are computed while they run.
  template <Path path, class Weight>
  __device__ __forceinline__ void overlapped_gradients(const Weight& weight, const Queries& tile,
                                                       int at, Tile<T, C> v, Products& x,
                                                       Fragments& aw, Fragments& dx) const {
    constexpr int n = 4 * kAtoms, kSteps = C / Mma<T>::kDepth / kTiles;
    const float per_scale = kIsFixedDegree<Weight> && path != Path::plain ? 1 / f.scale : 1;
    const Query* const of = tile.of + at + lane() % 4 * 2;
    Products dp;
    mma_abt<T>(dp, v, own, tile.g, at, [&](int step) __attribute__((always_inline)) {
      if (step % kSteps) return;
      const int j = step / kSteps;
      const Query query[2] = {of[8 * j], of[8 * j + 1]};
      const auto limit = [&](int i) { return query[i % 2].limit * per_scale; };
      const auto z = vec<n>([&](int i) {
        const float y = x[i / 4][j][i % 4];
        return kIsFixedDegree<Weight> ? y : shifted<T, W>(y, f.scale, query[i % 2].sub);
      });
      auto least = z;
      if (path != Path::plain) least = vec<n>([&](int i) { return min_nan(z[i], limit(i)); });
      Slope<Vec<n>> slope = slopes_of(weight, least);
      if (path != Path::plain)
        slope.dw = vec<n>([&](int i) { return z[i] < limit(i) ? slope.dw[i] : 0; });
#pragma unroll
      for (int i = 0; i < kAtoms; ++i) {
        float y[4];
#pragma unroll
        for (int c = 0; c < 4; ++c)
          y[c] = slope.w[4 * i + c] * query[c % 2].a, x[i][j][c] = slope.dw[4 * i + c];
        aw[i][j] = Mma<T>::rounded(y);
      }
    });
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const Query query[2] = {of[8 * j], of[8 * j + 1]};
#pragma unroll
      for (int i = 0; i < kAtoms; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          dp[i][j][c] = x[i][j][c] * (query[c % 2].a * dp[i][j][c] + query[c % 2].dW);
        dx[i][j] = Mma<T>::rounded(dp[i][j]);
      }
    }
  }
  // Changed scores of n elements: `column(i)` is the query of element i in its tile, `row(i)` its
  // key.
  template <int n>
  struct Changes {
    ChangedScore of[n];

    template <class Column, class Row, class Product, class Sub>
    __device__ __forceinline__ Vec<n> scores(const KeyScoreGradients& at, const Queries& tile,
                                             const Column& column, const Row& row,
                                             const Product& product, const Sub& sub) {
      const Fused& f = at.f;
      return vec<n>([&](int i) {
        const int t = tile.t0 + column(i);
        of[i] = changed_score<T>(f, product(i), bias_of(f, tile.head, t, at.key(row(i))),
                                 centre_of(f, tile.head, t));
        float y = of[i].x;
        if constexpr (kIsExp && !kHasDecayFactors<T, W>)
          if (f.decay_in_scores)
            y = with_log2_decay(
                y, log2_decay(tile.gates[column(i)], gates_at_key(f, tile.head, at.key(row(i)))),
                __frcp_rn(f.scale * kLog2e));
        return shifted<T, W>(y, f.scale, sub(i));
      });
    }
    // From the gradients of the scores to those of q.k times the scale.
    template <class Column, class Row>
    __device__ __forceinline__ void gradients(const KeyScoreGradients& at, const Queries& tile,
                                              const Column& column, const Row& row,
                                              Vec<n>& dx) const {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (!of[i].live) dx[i] = 0;
        if (at.f.d_bias && at.column < Shape::kOwn)
          add_bias_gradient(at.f, tile.head, tile.t0 + column(i), at.key(row(i)), dx[i]);
        dx[i] *= of[i].slope;
      }
    }
  };
  template <int n>
  __device__ void add_decay(const Queries& tile, int first, const Scores<n>& s,
                            const ScoreGradients<n>& y) {
    const auto x = vec<n>([&](int i) { return y.w[i] * (s.a[i] * s.dp[i] + s.dW[i]); });
    DecaySum<T> sum[kAtoms][2] = {};
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i / (4 * Shape::kTilesPerStep)][i / 2 % 2] += x[i];
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) d_decay[i / 2][i % 2] += sum[i / 2][i % 2];
    if (adds_rows())
      over_queries(tile, first, x, [&](int64_t row, double total) {
        atomicAdd(d_decay_at<T>(f, row), DecaySum<T>(total));
      });
  }
  // The same with decay or a centre, in 16 bits. KeyBlock::prepare_queries has put into `tile.of`
  // the decay factors of queries after the block's keys, and 1 / scale where the degree is fixed.
  template <Path path, class Weight>
  __device__ __forceinline__ void decayed_gradients(const Weight& weight, const Queries& tile,
                                                    int at, Products& x, Products& dp,
                                                    Fragments& aw, Fragments& dx) {
    constexpr int n = 4 * kAtoms;
    const float scale = kIsFixedDegree<Weight> ? 1 : f.scale * kUnit<W>;
    const auto row_of = [](int i) { return i / 4 * 2 + i / 2 % 2; };
    const uint32_t kept = path == Path::general && f.seen.keep ? kept_keys(tile.head.b) : ~0u;
    const auto dropout = dropout_of(tile, at);
    float log_decay[2 * kAtoms], of_keys[2 * kAtoms] = {};
    ColumnSums rows;
    if (path == Path::general && f.decay)
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) log_decay[i] = key_log2_decay(i, tile.head);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int first = at + 8 * j + lane() % 4 * 2;
      const Query query[2] = {tile.of[first], tile.of[first + 1]};
      const auto column_of = [&](int i) { return first + i % 2; };
      Scores<n> s;
      Changes<n> changes;
      if (path == Path::general && changes_scores(f)) {
        // where the degree is fixed, in units of q.k
        const float by = kIsFixedDegree<Weight> ? 1 / f.scale : 1;
        s.z = changes.scores(
            *this, tile, column_of, row_of, [&](int i) { return x[i / 4][j][i % 4]; },
            [&](int i) { return query[i % 2].sub / by; });
        if constexpr (kIsFixedDegree<Weight>) s.z = s.z * by;
      } else {
        s.z = vec<n>([&](int i) { return x[i / 4][j][i % 4] * scale - query[i % 2].sub; });
      }
      if (kIsExp && path == Path::general && f.decay)
        s.z = vec<n>([&](int i) {
          const float at_query = reinterpret_cast<const float2*>(tile.gates)[column_of(i)].x;
          return with_log2_decay(s.z[i], at_query - log_decay[row_of(i)], 1);
        });
      s.limit = vec<n>([&](int i) { return query[i % 2].limit; });
      s.dp = vec<n>([&](int i) { return dp[i / 4][j][i % 4]; });
      uint32_t stay = ~0u;
      if constexpr (kIsSpecial<Shape>) {
        stay = staying<n, 1>(dropout, first - at, row_of);
        s.dp = only(stay, s.dp);
      }
      s.a = vec<n>([&](int i) { return query[i % 2].a; });
      s.dW = vec<n>([&](int i) { return query[i % 2].dW; });
      s.seen = path == Path::general ? seen_by_two(tile.head, tile.t0 + first, kept) : ~0u;
      ScoreGradients<n> y = score_gradients<path, n>(weight, f, s, [](int) { return 0; });
      if (f.decay && !kIsExp) {
        const auto decay = vec<n>([&](int i) {
          if constexpr (path != Path::general) return factor[row_of(i)];
          const float at_query = reinterpret_cast<const float2*>(tile.gates)[first + i % 2].x;
          return decay_between(at_query, log_decay[row_of(i)]);
        });
        y = {y.w * decay, y.dx * decay};
      }
      if (path == Path::general && changes_scores(f))
        changes.gradients(*this, tile, column_of, row_of, y.dx);
      if (f.d_decay_key) {
        const auto dw = vec<n>([&](int i) { return y.w[i] * (s.a[i] * s.dp[i] + s.dW[i]); });
#pragma unroll
        for (int i = 0; i < n; ++i) of_keys[row_of(i)] += dw[i];
        add_columns(rows, j, dw);
      }
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const bool stays = !kIsSpecial<Shape> || stay >> i & 1;
        x[i / 4][j][i % 4] = stays ? y.w[i] * s.a[i] : 0, dp[i / 4][j][i % 4] = y.dx[i];
      }
#pragma unroll
      for (int i = 0; i < kAtoms; ++i)
        aw[i][j] = Mma<T>::rounded(x[i][j]), dx[i][j] = Mma<T>::rounded(dp[i][j]);
    }
    const int t = tile.t0 + at + ColumnSums::column();
    if (f.d_decay_key) {
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) d_decay[i / 2][i % 2] += of_keys[i];
      if (adds_rows()) add_row(static_cast<float*>(f.d_decay_query), tile.head, t, rows.total());
    }
    if (f.d_centre && adds_rows()) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        add_columns(rows, j, vec<n>([&](int i) { return dp[i / 4][j][i % 4]; }));
      add_row(f.d_centre, tile.head, t, -rows.total());  // subtracted from its query's scores
    }
  }
  template <int n>
  static __device__ __forceinline__ void add_columns(ColumnSums& to, int tile, const Vec<n>& x) {
    static_assert(kTiles == 4);
    float sum[2] = {x[0], x[1]};
#pragma unroll
    for (int i = 2; i < n; ++i) sum[i % 2] += x[i];
    to.add(tile, sum[0], sum[1]);
  }
  __device__ __forceinline__ void add_row(float* rows, const Head& head, int t, float x) const {
    if (t < f.T) atomicAdd(rows + head.row(f, t), x);
  }
  // Blocks that compute the same scores for other channels: only the first adds per-query values.
  // Without atomic additions `fused_dq` adds them.
  __device__ bool adds_rows() const { return f.dq_sum && column < Shape::kOwn; }
  // The sum over keys for each query.
  template <int n, class Add>
  __device__ void over_queries(const Queries& tile, int first, const Vec<n>& x,
                               const Add& add) const {
#pragma unroll
    for (int c = 0; c < 2 * Shape::kTilesPerStep; ++c) {
      double sum = 0;
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (i / 4 % Shape::kTilesPerStep == c / 2 && i % 2 == c % 2) sum += x[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const int t = tile.t0 + first + c / 2 * 8 + c % 2;
      if (lane() < 4 && t < f.T) add(tile.head.row(f, t), sum);
    }
  }

  template <bool general, bool factored, class Weight>
  __device__ __forceinline__ void gradients(const Weight& weight, const Queries& tile, int at,
                                            Products& x, Products& dp, Fragments& aw,
                                            Fragments& dx) {
    const int t = tile.t0 + at, t1 = t + Shape::kStep;
    if constexpr (factored) {
      (f.decay && !tile.after_keys) || changes_scores(f) || !visible.has_all(t, t1) || clamps(x)
          ? decayed_gradients<Path::general>(weight, tile, at, x, dp, aw, dx)
          : decayed_gradients<Path::plain>(weight, tile, at, x, dp, aw, dx);
    } else if constexpr (general) {
      tile_gradients<Path::general>(weight, tile, at, x, dp, aw, dx);
    } else {
      last_clamp(f) < INFINITY ? tile_gradients<Path::clamp>(weight, tile, at, x, dp, aw, dx)
                               : tile_gradients<Path::plain>(weight, tile, at, x, dp, aw, dx);
    }
  }
};

}  // namespace horner::attn::kernels::cuda

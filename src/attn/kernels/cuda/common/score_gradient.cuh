// From the products of a warp's keys with the queries of a tile to weights times a and the
// gradients of scores, rounded: the left factors of what the keys gather (fused_cuda_keys.cuh).
#pragma once

#include "attn/kernels/cuda/common/tiles.cuh"

namespace horner::attn::kernels::cuda {

// Where two warps share their keys, each takes the scores of half of the queries.
template <class T, int C, class W, class Shape>
struct KeyGrades {
  static constexpr int kAtoms = Shape::kAtoms, kTiles = Shape::kStep / 8;
  static constexpr int kSharing = 16 * kAtoms * Shape::kWarps / Shape::kKeys;
  static constexpr int kPart = Shape::kQueries / kSharing, kChannels = Shape::kOwn / kSharing;
  static constexpr bool kIsExp = std::is_same_v<W, Exp>;
  static constexpr bool kBeside = kHasFalls<T, W> && C <= 128;
  using Products = float[kAtoms][kTiles][4];
  using Factors = typename Mma<T>::Rounded[kAtoms][kTiles];

  const Fused& f;
  const W& w;
  int s0, own;       // the first key of the block, and that of the warp in it
  int part, column;  // of those who share; the first of the channels whose sums are here
  Sight sight;       // of the warp's keys
  double d_decay[kAtoms][2];
  float factor[2 * kAtoms];  // of the keys, where there are falls; of exp rows its logarithm

  // A tile of queries of one head, in shared memory.
  struct Queries {
    Head head;
    int t0;
    Tile<T, C> q, g;
    const Query* of;      // [kQueries]
    const double* gates;  // [kQueries]
    Tile<T, Shape::kQueries> dx, w;
    bool behind = false;  // with falls: every query stands behind every key of the block
  };

  __device__ KeyGrades(const Fused& f, const W& w, int s0, int first)
      : f(f),
        w(w),
        s0(s0),
        own(warp() / kSharing * 16 * kAtoms),
        part(warp() % kSharing),
        column(first + part * kChannels),
        sight(queries_that_see(f.seen, s0 + own, s0 + own + 16 * kAtoms)),
        d_decay{} {}
  __device__ int key(int i) const {  // of the thread's row i
    return s0 + own + i / 2 * 16 + i % 2 * 8 + lane() / 4;
  }

  // With falls, of which the block's last key is the reference.
  __device__ float fallen_to(double gates, const Head& head) const {
    return fallen(gates, gates_at_key(f, head, min(s0 + Shape::kKeys, f.S) - 1));
  }
  __device__ float fall_of_key(int i, const Head& head) const {
    return fallen_to(gates_at_key(f, head, key(i)), head);
  }
  __device__ void set_factors(const Head& head) {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      const float fall = f.decay ? -fall_of_key(i, head) : 0;
      factor[i] = kIsExp ? fall : exp2_fast(fall);
    }
  }

  // Whether some score of the warp may be above the clamp; polynomials do not look.
  __device__ __forceinline__ bool clamps(const Products& x) const {
    if (!kIsExp || !(f.clamp < INFINITY)) return f.clamp < INFINITY;
    const float most = __fdividef(f.clamp, f.scale);
    bool above = f.centre || f.clamp <= 0;
#pragma unroll
    for (int i = 0; i < kAtoms * kTiles * 4; ++i)
      above |= !(x[i / (4 * kTiles)][i / 4 % kTiles][i % 4] < most * 0.9999f);
    return __any_sync(~0u, above);
  }
  // A bit for each number of the thread that queries t and t + 1 see, of keys that are kept.
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
  // Hides the keys that a query does not see.
  __device__ __forceinline__ void hide(const Queries& tile, int at, Factors& aw,
                                       Factors& dx) const {
    const uint32_t kept = f.seen.keep ? kept_keys(tile.head.b) : ~0u;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const uint32_t seen = seen_by_two(tile.t0 + at + 8 * j + lane() % 4 * 2, kept);
#pragma unroll
      for (int i = 0; i < kAtoms; ++i)
        Mma<T>::keep(aw[i][j], seen >> 4 * i), Mma<T>::keep(dx[i][j], seen >> 4 * i);
    }
  }
  __device__ uint32_t kept_keys(int b) const {  // a bit for each of the thread's rows
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i)
      if (f.seen.keep[int64_t(b) * f.S + min(key(i), f.S - 1)]) bits |= 1u << i;
    return bits;
  }
  // From products to weights times a and the gradients of scores, some columns of tiles at a time.
  template <Care care, class Weight>
  __device__ __forceinline__ void grade(const Weight& weight, const Queries& tile, int at,
                                        Products& x, Products& dp, Factors& aw, Factors& dx) {
    constexpr bool raw = kOfDegree<Weight>;  // of products before the scale
    const float scale = f.scale * kUnit<W>, per_scale = raw && care != Care::none ? 1 / scale : 1;
    constexpr int kTilesAtOnce = Shape::kTilesAtOnce, n = 4 * kTilesAtOnce * kAtoms;
    // Number i of a batch: its atom, tile, row and column.
#pragma unroll
    for (int j = 0; j < kTiles; j += kTilesAtOnce) {
      const auto tile_of = [](int i) { return i / 4 % kTilesAtOnce; };
      const auto column_of = [&](int i) {
        return at + (j + tile_of(i)) * 8 + lane() % 4 * 2 + i % 2;
      };
      const auto row_of = [](int i) { return i / (4 * kTilesAtOnce) * 2 + i / 2 % 2; };
      const auto number = [&](Products& y, int i) -> float& {
        return y[i / (4 * kTilesAtOnce)][j + tile_of(i)][i % 4];
      };
      Query query[2 * kTilesAtOnce];  // of the columns
#pragma unroll
      for (int c = 0; c < 2 * kTilesAtOnce; ++c) query[c] = tile.of[column_of(c / 2 * 4 + c % 2)];
      const auto of = [&](int i) -> const Query& { return query[tile_of(i) * 2 + i % 2]; };
      Scored<n> s;
      s.z = lanes<n>([&](int i) { return raw ? number(x, i) : number(x, i) * scale - of(i).sub; });
      s.limit = lanes<n>([&](int i) { return of(i).limit * per_scale; });
      s.dp = lanes<n>([&](int i) { return number(dp, i); });
      s.a = lanes<n>([&](int i) { return of(i).a; });
      s.dW = lanes<n>([&](int i) { return of(i).dW; });
      s.seen = ~0u;
      if constexpr (care == Care::any) {
        s.seen = 0;
        const uint32_t kept = f.seen.keep ? kept_keys(tile.head.b) : ~0u;
#pragma unroll
        for (int i = 0; i < kTilesAtOnce * kAtoms; ++i) {
          const uint32_t two = seen_by_two(tile.t0 + column_of(i % kTilesAtOnce * 4), kept);
          s.seen |= (two >> i / kTilesAtOnce * 4 & 15) << 4 * i;
        }
      }
      if (care == Care::any && f.decay) {
        const auto faded = lanes<n>([&](int i) {
          return fade(tile.gates[column_of(i)], gates_at_key(f, tile.head, key(row_of(i))));
        });
        s.a = s.a * faded, s.dW = s.dW * faded;
      }
      const Graded<n> y = graded<care, n>(weight, f, s, [&](int i) {
        return tile.head.row(f, min(tile.t0 + column_of(i), f.T - 1));
      });
#pragma unroll
      for (int i = 0; i < n; ++i) number(x, i) = y.w[i] * s.a[i], number(dp, i) = y.dx[i];
#pragma unroll
      for (int i = 0; i < kAtoms * kTilesAtOnce; ++i) {
        const int atom = i / kTilesAtOnce, column = j + i % kTilesAtOnce;
        aw[atom][column] = Mma<T>::rounded(x[atom][column]);
        dx[atom][column] = Mma<T>::rounded(dp[atom][column]);
      }
      if (care == Care::any && f.decay) add_decay(tile, column_of(0), s, y);
      // A centre is subtracted from the scores of its query.
      if (care == Care::any && f.d_centre && adds_rows())
        over_queries(tile, column_of(0), y.dx,
                     [&](int64_t row, double sum) { atomicAdd(f.d_centre + row, float(-sum)); });
    }
  }
  // The same, where the products dp are yet to come: weights are taken beside them.
  template <Care care, class Weight>
  __device__ __forceinline__ void grade_beside(const Weight& weight, const Queries& tile, int at,
                                               Tile<T, C> v, Products& x, Factors& aw,
                                               Factors& dx) const {
    constexpr int n = 4 * kAtoms, kSteps = C / Mma<T>::kDepth / kTiles;
    const float scale = f.scale * kUnit<W>;
    const float per_scale = kOfDegree<Weight> && care != Care::none ? 1 / scale : 1;
    const Query* const of = tile.of + at + lane() % 4 * 2;
    Products dp;
    rows_by_rows<T>(dp, v, own, tile.g, at, [&](int step) __attribute__((always_inline)) {
      if (step % kSteps) return;
      const int j = step / kSteps;
      const Query query[2] = {of[8 * j], of[8 * j + 1]};
      const auto limit = [&](int i) { return query[i % 2].limit * per_scale; };
      const auto z = lanes<n>([&](int i) {
        const float y = x[i / 4][j][i % 4];
        return kOfDegree<Weight> ? y : y * scale - query[i % 2].sub;
      });
      auto least = z;
      if (care != Care::none) least = lanes<n>([&](int i) { return at_most(z[i], limit(i)); });
      Slope<Lanes<n>> slope = slopes_of(weight, least);
      if (care != Care::none)
        slope.dw = lanes<n>([&](int i) { return z[i] < limit(i) ? slope.dw[i] : 0; });
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
  template <int n>
  __device__ void add_decay(const Queries& tile, int first, const Scored<n>& s,
                            const Graded<n>& y) {
    const auto x = lanes<n>([&](int i) { return y.w[i] * (s.a[i] * s.dp[i] + s.dW[i]); });
    float sum[kAtoms][2] = {};
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i / (4 * Shape::kTilesAtOnce)][i / 2 % 2] += x[i];
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) d_decay[i / 2][i % 2] += sum[i / 2][i % 2];
    if constexpr (std::is_same_v<T, float>)
      if (f.d_decay_rows && adds_rows())
        over_queries(tile, first, x,
                     [&](int64_t row, double total) { atomicAdd(f.d_decay_rows + row, total); });
  }
  // The same with decay or a centre, in 16 bits. `tile.of` is as KeyBlock::ready leaves it: with
  // the factors of queries that stand behind, and before the scale where the degree is known.
  template <Care care, class Weight>
  __device__ __forceinline__ void grade_falls(const Weight& weight, const Queries& tile, int at,
                                              Products& x, Products& dp, Factors& aw, Factors& dx) {
    constexpr int n = 4 * kAtoms;
    const float scale = kOfDegree<Weight> ? 1 : f.scale * kUnit<W>;
    const auto row_of = [](int i) { return i / 4 * 2 + i / 2 % 2; };
    const uint32_t kept = care == Care::any && f.seen.keep ? kept_keys(tile.head.b) : ~0u;
    float fall[2 * kAtoms], of_keys[2 * kAtoms] = {}, of_queries[3];
    if (care == Care::any && f.decay)
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) fall[i] = fall_of_key(i, tile.head);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int first = at + 8 * j + lane() % 4 * 2;
      const Query query[2] = {tile.of[first], tile.of[first + 1]};
      Scored<n> s;
      constexpr bool added = kIsExp && care != Care::any;  // the factor of the key
      s.z = lanes<n>([&](int i) {
        return x[i / 4][j][i % 4] * scale - query[i % 2].sub + (added ? factor[row_of(i)] : 0);
      });
      s.limit =
          lanes<n>([&](int i) { return query[i % 2].limit + (added ? factor[row_of(i)] : 0); });
      s.dp = lanes<n>([&](int i) { return dp[i / 4][j][i % 4]; });
      s.a = lanes<n>([&](int i) { return query[i % 2].a; });
      s.dW = lanes<n>([&](int i) { return query[i % 2].dW; });
      s.seen = care == Care::any ? seen_by_two(tile.t0 + first, kept) : ~0u;
      Graded<n> y = graded<care, n>(weight, f, s, [](int) { return 0; });
      if (f.decay) {
        const auto faded = lanes<n>([&](int i) {
          if constexpr (care != Care::any) return factor[row_of(i)];
          const float at_query = reinterpret_cast<const float2*>(tile.gates)[first + i % 2].x;
          return fall_between(at_query, fall[row_of(i)]);
        });
        if (!added) y = {y.w * faded, y.dx * faded};
#pragma unroll
        for (int i = 0; i < n; ++i) of_keys[row_of(i)] += y.w[i] * (s.a[i] * s.dp[i] + s.dW[i]);
      }
      if (f.d_centre) {
        float sum[2] = {y.dx[0], y.dx[1]};
#pragma unroll
        for (int i = 2; i < n; ++i) sum[i % 2] += y.dx[i];
        of_queries[j % 2] = sums_of_half<4>(sum[0], sum[1]);
        if (j % 2) of_queries[j / 2 ? 1 : 2] = sums_of_half<8>(of_queries[0], of_queries[1]);
      }
#pragma unroll
      for (int i = 0; i < n; ++i)
        x[i / 4][j][i % 4] = y.w[i] * s.a[i], dp[i / 4][j][i % 4] = y.dx[i];
#pragma unroll
      for (int i = 0; i < kAtoms; ++i)
        aw[i][j] = Mma<T>::rounded(x[i][j]), dx[i][j] = Mma<T>::rounded(dp[i][j]);
    }
    if (f.decay)
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) d_decay[i / 2][i % 2] += of_keys[i];
    if (f.d_centre && adds_rows())
      add_centre(tile, at, sums_of_half<16>(of_queries[2], of_queries[1]));
  }
  // Of two sums over the keys of lanes `apart` from each other, each lane gets one: the lower lanes
  // x, the upper y.
  template <int apart>
  static __device__ __forceinline__ float sums_of_half(float x, float y) {
    const bool upper = lane() & apart;
    return (upper ? y : x) + __shfl_xor_sync(~0u, upper ? x : y, apart);
  }
  // `sum` is of the column that lane / 4 says: its tile and which of two. A centre is subtracted
  // from the scores of its query.
  __device__ __forceinline__ void add_centre(const Queries& tile, int at, float sum) const {
    static_assert(kTiles == 4);
    const int t = tile.t0 + at + lane() / 8 * 8 + lane() % 4 * 2 + lane() / 4 % 2;
    if (t < f.T) atomicAdd(f.d_centre + tile.head.row(f, t), -sum);
  }
  // Of the blocks that take the same scores for other channels, the first adds to what is one
  // number a query; without atomic additions `queries` does.
  __device__ bool adds_rows() const { return f.dq_sum && column < Shape::kOwn; }
  // The sum over the keys of each query.
  template <int n, class Add>
  __device__ void over_queries(const Queries& tile, int first, const Lanes<n>& x,
                               const Add& add) const {
#pragma unroll
    for (int c = 0; c < 2 * Shape::kTilesAtOnce; ++c) {
      double sum = 0;
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (i / 4 % Shape::kTilesAtOnce == c / 2 && i % 2 == c % 2) sum += x[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const int t = tile.t0 + first + c / 2 * 8 + c % 2;
      if (lane() < 4 && t < f.T) add(tile.head.row(f, t), sum);
    }
  }

  template <bool careful, bool falls, class Weight>
  __device__ __forceinline__ void grade_with_care(const Weight& weight, const Queries& tile, int at,
                                                  Products& x, Products& dp, Factors& aw,
                                                  Factors& dx) {
    const int t = tile.t0 + at, t1 = t + Shape::kStep;
    if constexpr (falls) {
      (f.decay && !tile.behind) || !sight.all_of(t, t1) || clamps(x)
          ? grade_falls<Care::any>(weight, tile, at, x, dp, aw, dx)
          : grade_falls<Care::none>(weight, tile, at, x, dp, aw, dx);
    } else if constexpr (careful) {
      grade<Care::any>(weight, tile, at, x, dp, aw, dx);
    } else {
      f.clamp < INFINITY ? grade<Care::clamp>(weight, tile, at, x, dp, aw, dx)
                         : grade<Care::none>(weight, tile, at, x, dp, aw, dx);
    }
  }
};

}  // namespace horner::attn::kernels::cuda

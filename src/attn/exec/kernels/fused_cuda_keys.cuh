// What a block of keys gathers from the queries that see it. Scores are taken transposed, keys by
// queries: weights and gradients of scores then stay in registers as the left factors of
//   dv += w^T dN  and  dk += dx^T q.
#pragma once

#include "attn/exec/kernels/fused_cuda_tiles.cuh"

namespace horner::attn::kernels::cuda {

// What the keys of a warp gather. Where two warps share their keys, each takes the scores of half
// of the queries and has the sums of half of the channels: what one has weighed it writes for both.
template <class T, int C, class W, class Shape>
struct KeySums {
  static constexpr int kAtoms = Shape::kAtoms, kTiles = Shape::kStep / 8;
  static constexpr int kSharing = 16 * kAtoms * Shape::kWarps / Shape::kKeys;
  static constexpr int kPart = Shape::kQueries / kSharing, kChannels = Shape::kOwn / kSharing;
  using Products = float[kAtoms][kTiles][4];
  using Factors = typename Mma<T>::Rounded[kAtoms][kTiles];

  const Fused& f;
  const W& w;
  int s0, own;       // the first key of the block, and that of the warp in it
  int part, column;  // of those who share; the first of the channels whose sums are here
  Sight sight;       // of the warp's keys
  float dk[kAtoms][kChannels / 8][4], dv[kAtoms][kChannels / 8][4];
  double d_decay[kAtoms][2];
  float factor[2 * kAtoms];  // of the keys, where there are falls

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

  __device__ KeySums(const Fused& f, const W& w, int s0, int first)
      : f(f),
        w(w),
        s0(s0),
        own(warp() / kSharing * 16 * kAtoms),
        part(warp() % kSharing),
        column(first + part * kChannels),
        sight(queries_that_see(f.seen, s0 + own, s0 + own + 16 * kAtoms)),
        dk{},
        dv{},
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
    for (int i = 0; i < 2 * kAtoms; ++i) factor[i] = f.decay ? exp2_fast(-fall_of_key(i, head)) : 1;
  }

  // Hides the keys that a query does not see.
  __device__ __forceinline__ void hide(const Queries& tile, int at, Factors& aw,
                                       Factors& dx) const {
    const uint32_t kept = f.seen.keep ? kept_keys(tile.head.b) : ~0u;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      uint32_t seen[kAtoms] = {};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int t = min(tile.t0 + at + 8 * j + lane() % 4 * 2 + c, f.T - 1);
        const int lo = f.seen.lo(t), hi = f.seen.hi(t);
#pragma unroll
        for (int i = 0; i < 2 * kAtoms; ++i)
          if (key(i) >= lo && key(i) < hi && kept >> i & 1) seen[i / 2] |= 1u << (i % 2 * 2 + c);
      }
#pragma unroll
      for (int i = 0; i < kAtoms; ++i)
        Mma<T>::keep(aw[i][j], seen[i]), Mma<T>::keep(dx[i][j], seen[i]);
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
#pragma unroll
        for (int c = 0; c < 2 * kTilesAtOnce; ++c) {
          const int t = min(tile.t0 + column_of(c / 2 * 4 + c % 2), f.T - 1);
          const int lo = f.seen.lo(t), hi = f.seen.hi(t);
#pragma unroll
          for (int i = 0; i < n; ++i)
            if (tile_of(i) == c / 2 && i % 2 == c % 2)
              s.seen |= uint32_t(key(row_of(i)) >= lo && key(row_of(i)) < hi) << i;
        }
        if (f.seen.keep) {
          const uint32_t kept = kept_keys(tile.head.b);
#pragma unroll
          for (int i = 0; i < n; ++i)
            if (!(kept >> row_of(i) & 1)) s.seen &= ~(1u << i);
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
      s.z = lanes<n>([&](int i) { return x[i / 4][j][i % 4] * scale - query[i % 2].sub; });
      s.limit = lanes<n>([&](int i) { return query[i % 2].limit; });
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
        y = {y.w * faded, y.dx * faded};
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

  // Adds a tile of queries. `weight` is w, or says its degree; `careful` is for decay and centred
  // scores, `falls` where those have a kernel.
  template <bool careful, bool falls = false, class Weight>
  __device__ __forceinline__ void add(const Weight& weight, const Queries& tile, Tile<T, C> k,
                                      Tile<T, C> v) {
    const typename Mma<T>::template Writer<Shape::kQueries> to_dx(tile.dx, own), to_w(tile.w, own);
#pragma unroll 1
    for (int i = 0; i < kPart / Shape::kStep; ++i) {
      const int at = part * kPart + i * Shape::kStep, t = tile.t0 + at, t1 = t + Shape::kStep;
      if (sight.nothing_of(t, t1)) {
        const Factors zeros = {};
        if (kSharing > 1) write(to_w, at, zeros);
        if (kSharing > 1 || f.dq_sum) write(to_dx, at, zeros);
        continue;
      }
      Products x, dp;
      rows_by_rows<T>(x, k, own, tile.q, at);
      rows_by_rows<T>(dp, v, own, tile.g, at);
      Factors aw, dx;
      if constexpr (falls) {
        f.clamp < INFINITY || (f.decay && !tile.behind) || !sight.all_of(t, t1)
            ? grade_falls<Care::any>(weight, tile, at, x, dp, aw, dx)
            : grade_falls<Care::none>(weight, tile, at, x, dp, aw, dx);
      } else if constexpr (careful) {
        grade<Care::any>(weight, tile, at, x, dp, aw, dx);
      } else {
        f.clamp < INFINITY ? grade<Care::clamp>(weight, tile, at, x, dp, aw, dx)
                           : grade<Care::none>(weight, tile, at, x, dp, aw, dx);
        if (!sight.all_of(t, t1)) hide(tile, at, aw, dx);
      }
      if (kSharing > 1) write(to_w, at, aw);
      if (kSharing > 1 || f.dq_sum) write(to_dx, at, dx);
      add_sums_by_columns<T>(dv, aw, tile.g, at, column);
      add_sums_by_columns<T>(dk, dx, tile.q, at, column);
    }
  }
  __device__ __forceinline__ void add(const Queries& tile, Tile<T, C> k, Tile<T, C> v) {
    is_careful(f) ? add<true>(w, tile, k, v) : add<false>(w, tile, k, v);
  }
  template <class Writer>
  static __device__ __forceinline__ void write(const Writer& to, int at, const Factors& x) {
#pragma unroll
    for (int i = 0; i < kAtoms; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; ++j) to.put(16 * i, at + 8 * j, x[i][j]);
  }
  // What the other warp has written.
  __device__ __forceinline__ void add_shared(const Queries& tile) {
    static_assert(kSharing == 2);
    const int at = (1 - part) * kPart;
    add_rows_by_columns<kPart>(dv, tile.w, own, tile.g, at, column);
    add_rows_by_columns<kPart>(dk, tile.dx, own, tile.q, at, column);
  }

  __device__ void finish_decay(const Head& head, double* shared) const {  // [kKeys]
    static_assert(kSharing == 1 || 2 * Shape::kQueries >= Shape::kKeys);
    for (int from = kSharing - 1; from >= 0; --from) {
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) {
        double d = d_decay[i / 2][i % 2];
        d += __shfl_xor_sync(~0u, d, 1);
        d += __shfl_xor_sync(~0u, d, 2);
        if (part != from || lane() % 4 != 0) continue;
        if (from + 1 < kSharing) d += shared[key(i) - s0];
        if (from > 0) shared[key(i) - s0] = d;
        if (from == 0 && column == 0 && key(i) < f.S) f.d_decay_key[head.key(f, key(i))] = -d;
      }
      if (kSharing > 1) __syncthreads();
    }
  }
  // The gradient of a gate is what its value gathers without it, times the value: of at most two
  // who have some of the channels, each adds its own, so that the bits are the same every time.
  __device__ __forceinline__ void finish_gates(const Head& head) {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      const int s = min(key(i), f.S - 1);
      const T* const v = row_of<T>(f.v, head.b, head.g, s);
      const float gate = gate_of_key(f, head, s);
      std::conditional_t<sizeof(T) == 4, double, float> sum = 0;
#pragma unroll
      for (int j = 0; j < kChannels / 4; ++j) {
        const int c = column + j / 2 * 8 + lane() % 4 * 2 + j % 2;
        float& x = dv[i / 2][j / 2][i % 2 * 2 + j % 2];
        if (c < f.E) sum += decltype(sum)(x) * decltype(sum)(float(v[c]));
        x *= gate;
      }
      for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane() % 4 == 0 && key(i) < f.S) atomicAdd(f.d_gate + head.key(f, s), float(sum));
    }
  }
  __device__ __forceinline__ void finish(const Head& head, double* shared) {
    if (f.d_decay_key) finish_decay(head, shared);
    if (f.gate) finish_gates(head);
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      const bool wanted = key(i) < f.S;
      const int64_t at = head.key(f, min(key(i), f.S - 1));
#pragma unroll
      for (int j = 0; j < kChannels / 8; j += 4) {
        float k[8], v[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          k[c] = dk[i / 2][j + c / 2][i % 2 * 2 + c % 2] * f.scale;
          v[c] = dv[i / 2][j + c / 2][i % 2 * 2 + c % 2];
        }
        const int first = column + 8 * j;
        store_32<T>(f.dk, at * f.D + first, f.D - first, wanted, k);
        store_32<T>(f.dv, at * f.E + first, f.E - first, wanted, v);
      }
    }
  }
};

}  // namespace horner::attn::kernels::cuda

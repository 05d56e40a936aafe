// Backward: a block of threads has a block of keys of one key head, each warp some of them, and
// goes over the tiles of queries that see them. Scores are taken transposed, keys by queries:
// weights and gradients of scores then stay in registers as the left factors of
//   dv += w^T dN  and  dk += dx^T q,
// and only dx goes to shared memory, for dq += dx k, which is added to memory atomically.
#pragma once

#include "attn/exec/kernels/fused_cuda_tiles.cuh"

namespace horner::attn::kernels::cuda {

template <class T, int C, class W>
struct BackwardShape {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kTilesAtOnce = 2;                    // of eight queries, in `grade`
  static constexpr int kAtoms = !kWide && C == 64 ? 2 : 1;  // of 16 keys, in a warp
  static constexpr int kWarps = kWide && C == 256 ? 2 : !kWide && C == 128 ? 8 : 4;
  static constexpr int kBlocks = !kWide && C == 64 ? 2 : 1;  // at least, on a multiprocessor
  static constexpr int kThreads = 32 * kWarps, kKeys = 16 * kAtoms * kWarps;
  static constexpr int kQueries = kWide ? (C == 256 ? 16 : 32) : C == 256 ? 32 : 64;
  // Queries taken at once; less where polynomials need the registers.
  static constexpr int kStep = kQueries < 32 || (kAtoms == 2 && !std::is_same_v<W, Exp>) ? 16 : 32;
  // The sums of 256 channels would not fit in registers: two blocks have half of them each.
  static constexpr int kOwn = C < 128 ? C : 128, kParts = C / kOwn;
  // dq: [16 kDqAtoms, kDqColumns] for each warp
  static constexpr int kDqAtoms = kQueries < 32 ? 1 : 2, kDqRows = kQueries / (16 * kDqAtoms);
  static constexpr int kDqColumns = kOwn / (kWarps / kDqRows);
  static constexpr int kTileBytes = kQueries * C * int(sizeof(T));
  static constexpr int kDxBytes = kKeys * kQueries * int(sizeof(T));
  static constexpr int kBytes = 2 * kKeys * C * int(sizeof(T)) + 4 * kTileBytes + 2 * kDxBytes +
                                2 * kQueries * int(sizeof(Query) + sizeof(double));
};

// Adds two neighbours in memory.
__device__ inline void add_pair(float* at, float a, float b) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float2*>(at), make_float2(a, b));
#else
  atomicAdd(at, a);
  atomicAdd(at + 1, b);
#endif
}

// What the keys of a warp gather.
template <class T, int C, class W, class Shape = BackwardShape<T, C, W>>
struct KeySums {
  static constexpr int kAtoms = Shape::kAtoms, kTiles = Shape::kStep / 8;
  using Products = float[kAtoms][kTiles][4];

  const Fused& f;
  const W& w;
  int s0, own;  // the first key of the block, and that of the warp in it
  int column;   // the first of the channels whose sums are here
  float dk[kAtoms][Shape::kOwn / 8][4], dv[kAtoms][Shape::kOwn / 8][4];
  double d_decay[kAtoms][2];

  // A tile of queries of one head, in shared memory.
  struct Queries {
    Head head;
    int t0;
    Tile<T, C> q, g;
    const Query* of;      // [kQueries]
    const double* gates;  // [kQueries]
    Tile<T, Shape::kQueries> dx;
  };

  __device__ KeySums(const Fused& f, const W& w, int s0, int column)
      : f(f), w(w), s0(s0), own(warp() * 16 * kAtoms), column(column), dk{}, dv{}, d_decay{} {}
  __device__ int key(int i) const {  // of the thread's row i
    return s0 + own + i / 2 * 16 + i % 2 * 8 + lane() / 4;
  }

  // From products to weights times a (in x) and the gradients of scores (in dp), two columns of
  // tiles at a time.
  __device__ __forceinline__ void grade(Care care, const Queries& tile, int at, Products& x,
                                        Products& dp) {
    if (care == Care::none) grade<Care::none>(tile, at, x, dp);
    if (care == Care::clamp) grade<Care::clamp>(tile, at, x, dp);
    if (care == Care::any) grade<Care::any>(tile, at, x, dp);
  }
  template <Care care>
  __device__ __forceinline__ void grade(const Queries& tile, int at, Products& x, Products& dp) {
    with_degree(w, slope_degree_of(w), [&](const auto& weight) __attribute__((always_inline)) {
      grade<care>(weight, tile, at, x, dp);
    });
  }
  template <Care care, class Weight>
  __device__ __forceinline__ void grade(const Weight& weight, const Queries& tile, int at,
                                        Products& x, Products& dp) {
    const float scale = f.scale * kUnit<W>;
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
      s.z = lanes<n>([&](int i) { return number(x, i) * scale - of(i).sub; });
      s.limit = lanes<n>([&](int i) { return of(i).limit; });
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
        if (f.seen.keep) s.seen &= kept<n>(tile.head.b, row_of);
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
      if (care == Care::any && f.decay) add_decay(s, y);
      if (f.d_centre && f.dq_sum) add_centre(tile, column_of(0), y.dx);
    }
  }
  // A bit for each number of a batch: whether its key is kept.
  template <int n, class RowOf>
  __device__ uint32_t kept(int b, const RowOf& row_of) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (f.seen.keep[int64_t(b) * f.S + min(key(row_of(i)), f.S - 1)]) bits |= 1u << i;
    return bits;
  }
  template <int n>
  __device__ void add_decay(const Scored<n>& s, const Graded<n>& y) {
    float sum[kAtoms][2] = {};
#pragma unroll
    for (int i = 0; i < n; ++i) sum[i / 8][i / 2 % 2] += y.w[i] * (s.a[i] * s.dp[i] + s.dW[i]);
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) d_decay[i / 2][i % 2] += sum[i / 2][i % 2];
  }
  // The centre of a query is subtracted from its scores.
  template <int n>
  __device__ void add_centre(const Queries& tile, int first, const Lanes<n>& dx) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (i / 4 % 2 == c / 2 && i % 2 == c % 2) sum += dx[i];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const int t = tile.t0 + first + c / 2 * 8 + c % 2;
      if (lane() < 4 && t < f.T) atomicAdd(f.d_centre + tile.head.row(f, t), -sum);
    }
  }

  __device__ __forceinline__ void add(const Queries& tile, Tile<T, C> k, Tile<T, C> v) {
    const Care care = care_for(f, tile.t0, tile.t0 + Shape::kQueries, s0, s0 + Shape::kKeys);
    const typename Mma<T>::template Writer<Shape::kQueries> writer(tile.dx, own);
#pragma unroll 1
    for (int at = 0; at < Shape::kQueries; at += Shape::kStep) {
      Products x, dp;
      rows_by_rows<T>(x, k, own, tile.q, at);
      rows_by_rows<T>(dp, v, own, tile.g, at);
      grade(care, tile, at, x, dp);
      add_sums_by_columns<T>(dv, x, tile.g, at, column);
      add_sums_by_columns<T>(dk, dp, tile.q, at, column);
      if (!f.dq_sum) continue;
#pragma unroll
      for (int i = 0; i < kAtoms; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j) writer.put(16 * i, at + 8 * j, dp[i][j]);
    }
  }

  // dq += dx k, when every warp has written its dx.
  __device__ __forceinline__ void add_dq(const Queries& tile, Tile<T, C> k) const {
    constexpr int n = Shape::kDqColumns / 8;
    const int t = warp() % Shape::kDqRows * 16 * Shape::kDqAtoms;
    const int d = column + warp() / Shape::kDqRows * Shape::kDqColumns;
    float dq[Shape::kDqAtoms][n][4];
    const typename Mma<T>::template LeftColumns<Shape::kQueries> lefts(tile.dx, 0, t);
    const typename Mma<T>::template RightColumns<C> rights(k, 0, d);
#pragma unroll
    for (int s = 0; s < Shape::kKeys; s += Mma<T>::kDepth) {
      typename Mma<T>::A left[Shape::kDqAtoms];
#pragma unroll
      for (int i = 0; i < Shape::kDqAtoms; ++i) left[i] = lefts.at(s, 16 * i);
#pragma unroll
      for (int j = 0; j < n; j += 2) {
        const auto right = rights.at(s, 8 * j);
#pragma unroll
        for (int i = 0; i < Shape::kDqAtoms; ++i)
          s == 0 ? Mma<T>::template multiply<false>(dq[i][j], dq[i][j + 1], left[i], right)
                 : Mma<T>::template multiply<true>(dq[i][j], dq[i][j + 1], left[i], right);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * Shape::kDqAtoms; ++i) {
      const int at = tile.t0 + t + i / 2 * 16 + i % 2 * 8 + lane() / 4;
      if (at >= f.T) continue;
      float* const row = f.dq_sum + tile.head.row(f, at) * f.D;
#pragma unroll
      for (int j = 0; j < n; ++j) {
        const float* y = dq[i / 2][j] + i % 2 * 2;
        if (d + 8 * j < f.D)
          add_pair(row + d + 8 * j + lane() % 4 * 2, y[0] * f.scale, y[1] * f.scale);
      }
    }
  }

  __device__ __forceinline__ void finish(const Head& head) const {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      const int s = key(i);
      double d = d_decay[i / 2][i % 2];
      if (f.decay) {
        d += __shfl_xor_sync(~0u, d, 1);
        d += __shfl_xor_sync(~0u, d, 2);
      }
      if (s >= f.S) continue;
      const int64_t at = head.key(f, s);
      if (f.d_decay_key && column == 0 && lane() % 4 == 0) f.d_decay_key[at] = -d;
#pragma unroll
      for (int j = 0; j < Shape::kOwn / 8; ++j) {
        const int c = column + 8 * j + lane() % 4 * 2;
        const float *k = dk[i / 2][j] + i % 2 * 2, *v = dv[i / 2][j] + i % 2 * 2;
        if (column + 8 * j < f.D) store_pair<T>(f.dk, at * f.D + c, k[0] * f.scale, k[1] * f.scale);
        if (column + 8 * j < f.E) store_pair<T>(f.dv, at * f.E + c, v[0], v[1]);
      }
    }
  }
};

template <class T, int C, class W>
__global__ __launch_bounds__(
    BackwardShape<T, C, W>::kThreads,
    BackwardShape<T, C, W>::kBlocks) void keys_kernel(const __grid_constant__ Fused f,
                                                      const __grid_constant__ W w) {
  using Shape = BackwardShape<T, C, W>;
  constexpr int kKeys = Shape::kKeys, kQueries = Shape::kQueries, kThreads = Shape::kThreads;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, C> k{shared_address(memory)}, v{k.at + kKeys * C * int(sizeof(T))};
  unsigned char* const stages = memory + 2 * kKeys * C * sizeof(T);
  const Tile<T, kQueries> dx{shared_address(stages + 4 * Shape::kTileBytes)};
  const auto* const of =
      reinterpret_cast<const Query*>(stages + 4 * Shape::kTileBytes + 2 * Shape::kDxBytes);
  const auto* const gates = reinterpret_cast<const double*>(of + 2 * kQueries);

  // Every query head that reads this key head, one after the other.
  const int each = f.H / f.G, key_head = int(blockIdx.x) / Shape::kParts;
  const int column = int(blockIdx.x) % Shape::kParts * Shape::kOwn;
  const int b = key_head / f.G, first_head = key_head % f.G * each;
  const int s0 = int(blockIdx.y) * kKeys;  // a causal mask: most queries first
  const int begin = f.seen.first_query(s0) / kQueries * kQueries;
  const int end = f.seen.end_query(min(s0 + kKeys, f.S));

  // The tile of queries from t0 on, of head first_head + h.
  const auto queries = [&](int stage, int h, int t0) -> typename KeySums<T, C, W>::Queries {
    const Tile<T, C> q{shared_address(stages + stage * 2 * Shape::kTileBytes)};
    return {Head(b, first_head + h, key_head % f.G),
            t0,
            q,
            {q.at + Shape::kTileBytes},
            of + stage * kQueries,
            gates + stage * kQueries,
            {dx.at + stage * Shape::kDxBytes}};
  };
  const auto copy = [&](int stage, int h, int t0) {
    const auto to = queries(stage, h, t0);
    const int real = f.T - t0;
    copy_rows<kQueries, kThreads>(to.q, row_of<T>(f.q, b, first_head + h, t0), f.q.row, real, f.D);
    copy_rows<kQueries, kThreads>(to.g, row_of<T>(f.d_o, b, first_head + h, t0), f.d_o.row, real,
                                  f.E);
    if (threadIdx.x >= kQueries) return;
    const int n = int(threadIdx.x);
    copy_16_bytes(shared_address(to.of + n), f.queries + to.head.row(f, n < real ? t0 + n : 0),
                  n < real);
    if (f.decay) const_cast<double*>(to.gates)[n] = gates_at_query(f, to.head, t0 + n);
  };
  copy_rows<kKeys, kThreads>(k, row_of<T>(f.k, b, key_head % f.G, s0), f.k.row, f.S - s0, f.D);
  copy_rows<kKeys, kThreads>(v, row_of<T>(f.v, b, key_head % f.G, s0), f.v.row, f.S - s0, f.E);
  if (begin < end) copy(0, 0, begin);

  KeySums<T, C, W> sums(f, w, s0, column);
  int stage = 0, before = -1, before_t0 = 0;
  for (int h = 0, t0 = begin; begin < end && h < each; stage ^= 1) {
    wait_for_copies();
    __syncthreads();  // these queries are there, and all are done with those before
    const auto tile = queries(stage, h, t0);
    if ((t0 += kQueries) >= end) t0 = begin, ++h;
    if (h < each) copy(stage ^ 1, h, t0);
    // dq of the queries before: no warp has to wait for the others' dx once more
    if (f.dq_sum && before >= 0) sums.add_dq(queries(stage ^ 1, before, before_t0), k);
    before = tile.head.h - first_head, before_t0 = tile.t0;
    sums.add(tile, k, v);
  }
  wait_for_copies();
  if (f.dq_sum && before >= 0) {
    __syncthreads();
    sums.add_dq(queries(stage ^ 1, before, before_t0), k);
  }
  sums.finish(Head(b, first_head, key_head % f.G));
}

}  // namespace horner::attn::kernels::cuda

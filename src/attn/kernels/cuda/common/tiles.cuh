// The work of a thread block, masks, decay, and copies of q, k and v to shared memory (cp.async).
#pragma once

#include "attn/kernels/cuda/common/products.cuh"
#include "attn/kernels/cuda/common/weights.cuh"

namespace horner::attn::kernels::cuda {

// Head h of batch b, and its key head.
struct Head {
  int b, h, g;

  __device__ Head(int b, int h, int g) : b(b), h(h), g(g) {}
  __device__ Head(const Fused& f, int index) : b(index / f.H), h(index % f.H), g(h / (f.H / f.G)) {}
  __device__ int64_t row(const Fused& f, int t) const { return int64_t(b * f.H + h) * f.T + t; }
  __device__ int64_t key(const Fused& f, int s) const { return int64_t(b * f.G + g) * f.S + s; }
};

template <class T>
__device__ const T* row_of(const View& x, int b, int h, int row) {
  return static_cast<const T*>(x.at) + b * x.batch + h * x.head + row * x.row;
}

// Order of thread blocks: some heads at a time, block 0 of each, then block 1, ... The longest come
// first, and what these heads read and accumulate stays in L2.
struct BlockSchedule {
  int head, block;

  __device__ BlockSchedule(int index, int heads, int blocks) {
    constexpr int kTogether = 256;  // blocks of such a group, at least
    const int some = min(heads, (kTogether + blocks - 1) / blocks), first = index / (some * blocks);
    const int here = min(some, heads - first * some), rest = index - first * some * blocks;
    head = first * some + rest % here, block = rest / here;
  }
};

// Hides a value from the compiler, which would repeat a division in every iteration.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// cp.async wrappers.
__device__ inline void cp_async_16(uint32_t to, const void* from, bool real) {
  const int bytes = real ? 16 : 0;  // 0 bytes: zero-fills, does not read
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void cp_async_8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// Copies rows from `from` on; zero-fills beyond `real` rows and `channels` channels.
template <int rows, int threads, class T, int C>
__device__ inline void copy_rows(Tile<T, C> to, const T* from, int64_t stride, int real,
                                 int channels) {
  constexpr int kChunks = Tile<T, C>::kChunks, kStep = threads / kChunks;
  static_assert(threads % kChunks == 0);
  const int first = int(threadIdx.x) / kChunks, chunk = int(threadIdx.x) % kChunks;
  const int inside = chunk * Tile<T, C>::kChunk < channels ? real - first : 0;
  const T* at = from + first * stride + chunk * Tile<T, C>::kChunk;
#pragma unroll
  for (int i = 0; i < rows; i += kStep, at += kStep * stride) {
    if (rows % kStep != 0 && first + i >= rows) return;
    cp_async_16(to.chunk(first + i, chunk), at, i < inside);
  }
}

__device__ inline uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// Reductions over the four lanes that share a row of a fragment.
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Adds across lanes `apart` from each other: the lower lanes get the sum of x, the upper of y.
template <int apart>
__device__ __forceinline__ float sums_of_half(float x, float y) {
  const bool upper = lane() & apart;
  return (upper ? y : x) + __shfl_xor_sync(~0u, upper ? x : y, apart);
}
// Sums of 32 columns of a warp's fragments over its rows. `add` takes a thread's sums of its two
// columns of tile 0, 1, 2 and 3, in this order; each lane then gets the `total` of one `column`.
struct ColumnSums {
  float part[3];

  __device__ __forceinline__ void add(int tile, float even, float odd) {
    part[tile % 2] = sums_of_half<4>(even, odd);
    if (tile % 2) part[tile / 2 ? 1 : 2] = sums_of_half<8>(part[0], part[1]);
  }
  __device__ __forceinline__ float total() const { return sums_of_half<16>(part[2], part[1]); }
  static __device__ int column() { return lane() / 8 * 8 + lane() % 4 * 2 + lane() / 4 % 2; }
};

// Whether some query of [t0, t1) does not see some key of [s0, s1).
__device__ inline bool is_partial(const Seen& seen, int t0, int t1, int s0, int s1) {
  return seen.keep || seen.lo(min(t1, seen.T) - 1) > s0 || seen.hi(t0) < s1;
}

__device__ inline Path path_for(const Fused& f, int t0, int t1, int s0, int s1) {
  if (f.decay || is_partial(f.seen, t0, t1, s0, s1)) return Path::general;
  return f.clamp < INFINITY ? Path::clamp : Path::plain;
}

// The range seen by (or seeing) some of an interval, and the range seen by all of it.
struct VisibleRange {
  int some_begin, some_end, all_begin, all_end;

  __device__ bool has_none(int begin, int end) const {
    return begin >= some_end || end <= some_begin;
  }
  __device__ bool has_all(int begin, int end) const { return begin >= all_begin && end <= all_end; }
};
// Tiles of n keys that the queries from t0 to `last` loop over: s0 = begin, after(s0), ... < end.
template <int n>
struct KeyTiles {
  int begin, end;

  __device__ int after(int s0) const { return s0 + n; }
};
template <int n>
__device__ inline KeyTiles<n> key_tiles(const Seen& seen, int, int t0, int last) {
  return {seen.lo(t0) / n * n, seen.hi(last)};
}
// The keys that queries [t0, t1) see.
__device__ inline VisibleRange keys_seen_by(const Seen& seen, int, int t0, int t1) {
  if (t0 >= seen.T) return {0, 0, 0, 0};
  const int last = min(t1, seen.T) - 1;
  return {seen.lo(t0), seen.hi(last), seen.lo(last), seen.keep ? 0 : seen.hi(t0)};
}
// The queries that see keys [s0, s1).
__device__ inline VisibleRange queries_that_see(const Seen& seen, int s0, int s1) {
  if (s0 >= seen.S) return {0, 0, 0, 0};
  const int end = min(s1, seen.S);
  const bool whole = end == s1 && !seen.keep;
  return {seen.first_query(s0), seen.end_query(end), seen.first_query(end - 1),
          whole ? seen.end_query(s0 + 1) : 0};
}

// One bit for each of the n keys first, first + 1, first + 8, first + 9, ... in lo <= s < hi.
template <int n>
__device__ inline uint32_t keys_within(int lo, int hi, int first) {
  const auto key = [&](int i) { return first + i / 2 * 8 + i % 2; };
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) bits |= uint32_t(key(i) >= lo && key(i) < hi) << i;
  return bits;
}
// Without those that `keep` hides.
template <int n>
__device__ inline uint32_t kept_of(const Seen& seen, int b, int first, uint32_t bits) {
  const auto key = [&](int i) { return first + i / 2 * 8 + i % 2; };
  if (!seen.keep) return bits;
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (!seen.keep[int64_t(b) * seen.S + min(key(i), seen.S - 1)]) bits &= ~(1u << i);
  return bits;
}
// Those that query t sees.
template <int n>
__device__ inline uint32_t seen_keys(const Seen& seen, int b, int t, int first) {
  const int at = min(t, seen.T - 1), lo = seen.lo(at), hi = seen.hi(at);
  return kept_of<n>(seen, b, first, keys_within<n>(lo, hi, first));
}

// Decay, centred scores and other changes of them run separate code.
HORNER_HD bool has_decay_or_centre(const Fused& f) {
  return f.decay || f.centre || changes_scores(f);
}
// Whether the backward sums more than dq, dk and dv, or has decay: a constant centre needs neither.
HORNER_HD bool sums_general_gradients(const Fused& f) {
  return f.decay || f.d_centre || changes_scores(f);
}
// Whether decay and centred scores have a separate kernel, with decay as a row times a column
// factor (`factored`). If not, as in float32, scores decay one by one, in double, with one loop for
// all degrees.
template <class T, class W>
inline constexpr bool kHasDecayFactors =
    sizeof(T) == 2 && (std::is_same_v<W, Exp> || std::is_same_v<W, Polynomial>);
// The degree (of values or slopes) that kernels specialize on. None in float32, where the products
// take most of the time.
template <class T>
HORNER_HD int known_degree(int degree) {
  return sizeof(T) == 2 ? degree : 0;
}

// Running sums of the log gates; gates may be above 1.
__device__ inline double gates_at_key(const Fused& f, const Head& head, int s) {
  return f.decay[head.key(f, min(max(s, 0), f.S - 1))];
}
__device__ inline double gates_at_query(const Fused& f, const Head& head, int t) {
  return gates_at_key(f, head, t + f.S - f.T);
}
// The product of the gates in (s, t], subtracted in double; finite for any two tokens.
__device__ inline float decay_factor(double query, double key) {
  const double x = fmin(query - key, 87.0);
  const float high = float(x);
  return expf(high) * (1 + float(x - double(high)));
}

// 16-bit: log2 of the decay at a token relative to a `reference` near it. A float is coarse for
// tokens far before it, but their weights have decayed to 0.
__device__ inline float log2_decay(double gates, double reference) {
  return float(gates - reference) * kLog2e;
}
// The product of the gates in (s, t], finite for any two tokens. If the reference is between s and
// t, it is the key's factor 2^-at_key times the query's factor 2^at_query, both at most 1 for gates
// up to 1.
__device__ inline float decay_between(float at_query, float at_key) {
  constexpr float kLargestExponent = 126;
  return exp2_fast(fminf(at_query - at_key, kLargestExponent));
}

// The sums of Fused::d_decay_query in a problem of dtype T.
template <class T>
using DecaySum = std::conditional_t<sizeof(T) == 4, double, float>;
template <class T>
__device__ inline DecaySum<T>* d_decay_at(const Fused& f, int64_t row) {
  return static_cast<DecaySum<T>*>(f.d_decay_query) + row;
}

__device__ inline float gate_of_key(const Fused& f, const Head& head, int s) {
  return f.gate[head.key(f, min(s, f.S - 1))];
}

// Scales 16 bytes in shared memory.
template <class T>
__device__ inline void scale_chunk(uint32_t at, float by) {
  uint4* const words = static_cast<uint4*>(__cvta_shared_to_generic(at));
  uint4 w = *words;
  T* const x = reinterpret_cast<T*>(&w);
#pragma unroll
  for (int i = 0; i < 16 / int(sizeof(T)); ++i) x[i] = T(float(x[i]) * by);
  *words = w;
}

// Multiplies value rows from s0 on by the gates of their keys. Called by the threads that copied
// them (copy_rows), after their copies completed.
template <int rows, int threads, class T, int C>
__device__ inline void gate_values(const Fused& f, const Head& head, int s0, Tile<T, C> v) {
  constexpr int kChunks = Tile<T, C>::kChunks, kStep = threads / kChunks;
  const int first = int(threadIdx.x) / kChunks, chunk = int(threadIdx.x) % kChunks;
#pragma unroll
  for (int i = first; i < rows; i += kStep)
    scale_chunk<T>(v.chunk(i, chunk), gate_of_key(f, head, s0 + i));
}
// Copies the gates of n keys from s0 on to shared memory.
template <int n>
__device__ inline void copy_gates(const Fused& f, const Head& head, int s0, float* to) {
  const int i = int(threadIdx.x);
  if (i < n) cp_async_4(shared_address(to + i), f.gate + head.key(f, min(s0 + i, f.S - 1)));
}
// Multiplies weights by the gates of their columns; `gates` is in shared memory.
template <int atoms, int n>
__device__ __forceinline__ void gate_columns(const float* gates, float (&x)[atoms][n][4]) {
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float2 two = *reinterpret_cast<const float2*>(gates + 8 * j + lane() % 4 * 2);
#pragma unroll
    for (int i = 0; i < atoms; ++i)
      x[i][j][0] *= two.x, x[i][j][1] *= two.y, x[i][j][2] *= two.x, x[i][j][3] *= two.y;
  }
}

template <class T>
__device__ inline void store_pair(void* rows, int64_t at, float a, float b) {
  *reinterpret_cast<uint32_t*>(static_cast<T*>(rows) + at) = pack2(T(), a, b);
}
template <>
__device__ inline void store_pair<float>(void* rows, int64_t at, float a, float b) {
  *reinterpret_cast<float2*>(static_cast<float*>(rows) + at) = make_float2(a, b);
}

// Warp shuffle from two adjacent elements in each of four tiles to eight adjacent ones: lane i of
// four gets tile i. x[2 j] and x[2 j + 1] are a lane's elements of tile j, [8] over the four lanes.
template <class T>
__device__ inline uint4 gather_8(const float (&x)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) words[j] = pack2(T(), x[2 * j], x[2 * j + 1]);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane() & step;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & step) continue;
      uint32_t &low = words[j], &high = words[j + step];
      const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, step);
      (upper ? low : high) = other;
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
// Stores such elements of four adjacent tiles, [32], if `wanted`; only the first `channels`.
template <class T>
__device__ inline void store_32(void* rows, int64_t at, int channels, bool wanted,
                                const float (&x)[8]) {
  if constexpr (sizeof(T) == 2) {
    const uint4 words = gather_8<T>(x);
    const int c = lane() % 4 * 8;
    if (wanted && c < channels) *reinterpret_cast<uint4*>(static_cast<T*>(rows) + at + c) = words;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (wanted && 8 * j < channels)
        store_pair<T>(rows, at + 8 * j + lane() % 4 * 2, x[2 * j], x[2 * j + 1]);
  }
}

}  // namespace horner::attn::kernels::cuda

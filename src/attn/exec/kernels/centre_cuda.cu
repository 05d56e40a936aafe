// A warp has a chunk of rows, a lane two channels of each. P(j), the sum of the rows before j, is
// that of the chunks before, from memory, and of some rows of the next: the sum over [lo, hi) is
// P(hi) - P(lo). As lo and hi never go back, each row is added once; where for every row of a chunk
// they stand or go one further, which they do but for the ends of windows and sequences, eight rows
// are loaded at once.
#include <algorithm>

#include "attn/exec/kernels/centre_cuda.h"
#include "attn/exec/kernels/fused_cuda_launch.cuh"

namespace horner::attn::kernels::cuda {

constexpr int kChunk = 32;      // rows: a lane for each, where that is all a row needs
constexpr int kAtOnce = 8;      // rows
constexpr int kGroup = 2 * 32;  // channels of a warp
constexpr int kCentreWarps = 4, kCentreThreads = 32 * kCentreWarps;  // of a block
constexpr int kSegments = 16;                                        // of chunks, in `scan_kernel`
constexpr unsigned kAll = ~0u;                                       // lanes

// Blocks on a multiprocessor, at least.
template <class T>
inline constexpr int kCentreBlocks = sizeof(T) == 2 ? 4 : 3;

HORNER_HD int chunks(int rows) {
  return (rows + kChunk - 1) / kChunk;
}
HORNER_HD int groups(const Centre& f) {
  return (f.D + kGroup - 1) / kGroup;
}

// Two neighbours of a row.
template <class T>
struct alignas(2 * sizeof(T)) Two {
  T x, y;
};
// Sums of rows inside a chunk. Those of chunks are double.
template <class T>
using Sum = std::conditional_t<sizeof(T) == 4, double, float>;
template <class T>
struct Sums {
  Sum<T> x, y;
};
template <class T>
__device__ inline Sums<T> operator+(Sums<T> a, Sums<T> b) {
  return {a.x + b.x, a.y + b.y};
}
template <class T>
__device__ inline Sums<T> operator-(Sums<T> a, Sums<T> b) {
  return {a.x - b.x, a.y - b.y};
}

// The chunk of a head that a warp has, and a lane's channels: where there are none it has those of
// the row's beginning, and is not `real`.
struct CentrePlace {
  int index, chunk, channel;  // index: of the head, or past the last
  bool real;

  __device__ CentrePlace(const Centre& f, int n, int groups) {
    const int at = int(blockIdx.x) * kCentreWarps + warp(), of_head = n * groups;
    index = at / of_head, chunk = (at - index * of_head) / groups;
    set_group(f, (at - index * of_head) % groups);
  }
  __device__ void set_group(const Centre& f, int group) {
    channel = group * kGroup + 2 * lane();
    real = channel < f.D;
    if (!real) channel = 0;
  }
};
template <class T>
__device__ inline T* channels_of(const View& x, int b, int h, int channel) {
  return static_cast<T*>(x.at) + b * x.batch + h * x.head + channel;
}

__device__ inline float count_of(const Centre& f, int b, int t) {
  return f.count ? f.count[int64_t(b) * f.T + t] : float(max(f.seen.hi(t) - f.seen.lo(t), 1));
}

// Two channels of the rows of head `index` of [B, G], with a factor for each row.
template <class T>
struct Keys {
  const Centre& f;
  int b, g, channel;

  __device__ Keys(const Centre& f, int index, int channel)
      : f(f), b(index / f.G), g(index % f.G), channel(channel) {}
  static HORNER_HD int rows(const Centre& f) { return f.S; }
  __device__ int heads() const { return 1; }
  __device__ float factor(int, int s) const {  // 0 where hidden
    return s >= 0 && s < f.S && !(f.seen.keep && !f.seen.keep[int64_t(b) * f.S + s]) ? 1 : 0;
  }
  __device__ const T* row(int, int s) const {
    return channels_of<T>(f.k, b, g, channel) + min(max(s, 0), f.S - 1) * f.k.row;
  }
};
// Of a group's heads, each query times the gradient of its centre over the count.
template <class T>
struct Queries {
  const Centre& f;
  int b, g, channel;

  __device__ Queries(const Centre& f, int index, int channel)
      : f(f), b(index / f.G), g(index % f.G), channel(channel) {}
  static HORNER_HD int rows(const Centre& f) { return f.T; }
  __device__ int heads() const { return f.H / f.G; }
  __device__ float factor(int h, int t) const {
    if (t < 0 || t >= f.T) return 0;
    return f.d_centre[(int64_t(b) * f.H + g * heads() + h) * f.T + t] / count_of(f, b, t);
  }
  __device__ const T* row(int h, int t) const {
    return channels_of<T>(f.q, b, g * heads() + h, channel) + min(max(t, 0), f.T - 1) * f.q.row;
  }
};

// Adds rows first + r, first + r + 1, ... to those given, for an r that all lanes have. `own` is
// the factor of the first head's row first + lane; rows from `end` on have none.
template <class T, class Rows>
__device__ __forceinline__ void add_rows(const Rows& x, int first, int r, int end, float own,
                                         Sums<T> (&to)[kAtOnce]) {
  for (int h = 0; h < x.heads(); ++h) {
    if (h > 0) own = first + lane() < end ? x.factor(h, first + lane()) : 0;
    Two<T> y[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      y[i] = *reinterpret_cast<const Two<T>*>(x.row(h, first + r + i));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Sum<T> by = __shfl_sync(kAll, own, r + i);
      if (by != 0) to[i].x += by * Sum<T>(float(y[i].x)), to[i].y += by * Sum<T>(float(y[i].y));
    }
  }
}

// P(j) = base + part, for j that never go back.
template <class T, class Rows>
struct Before {
  const Rows& x;
  const double* sums;  // of the head's chunks, from the lane's channels on
  int at = 0;
  double2 base = {};
  Sums<T> part = {};

  __device__ __forceinline__ void to_chunk_of(int j) {
    at = max(j, 0) / kChunk * kChunk;
    base = *reinterpret_cast<const double2*>(sums + int64_t(at / kChunk) * x.f.D);
    part = {};
  }
  __device__ __forceinline__ void start(int j) {
    to_chunk_of(j);
    const float own = at + lane() < j ? x.factor(0, at + lane()) : 0;
#pragma unroll 1
    for (int r = 0; at + r < j; r += kAtOnce) {
      Sums<T> rows[kAtOnce] = {};
      add_rows<T>(x, at, r, j, own, rows);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) part = part + rows[i];
    }
    at = j;
  }
  __device__ __forceinline__ void go_to(int j) {  // by single rows
    if (j / kChunk > at / kChunk) to_chunk_of(j);
#pragma unroll 1
    for (; at < j; ++at)
      for (int h = 0; h < x.heads(); ++h) {
        const Sum<T> by = x.factor(h, at);
        const Two<T> y = *reinterpret_cast<const Two<T>*>(x.row(h, at));
        if (by != 0) part.x += by * Sum<T>(float(y.x)), part.y += by * Sum<T>(float(y.y));
      }
  }
};

// The sums over [lo, hi) of the rows x, for the `n` rows from `from` on that the lanes have lo and
// hi of: given to `sink`, some at a time.
template <class T, class Rows, class Sink>
__device__ __forceinline__ void over_intervals(const Rows& x, const double* sums, int from, int n,
                                               int lo, int hi, Sink& sink) {
  const auto follows = [&](int j, int step) {
    return __all_sync(kAll, from + lane() >= n || j == __shfl_sync(kAll, j, 0) + step * lane());
  };
  const bool hi_stands = follows(hi, 0), hi_goes = !hi_stands && follows(hi, 1);
  const bool lo_stands = follows(lo, 0), lo_goes = !lo_stands && follows(lo, 1);
  const bool even = (hi_stands || hi_goes) && (lo_stands || lo_goes);
  const int first_hi = __shfl_sync(kAll, hi, 0), first_lo = __shfl_sync(kAll, lo, 0);
  Before<T, Rows> up{x, sums}, down{x, sums};
  const int next = first_hi - hi_goes;  // the row that `up` adds first
  up.start(next), down.start(first_lo);
  const int end = Rows::rows(x.f);
  const float of_up = hi_goes ? x.factor(0, next + lane()) : 0;
  const float of_down = lo_goes ? x.factor(0, first_lo + lane()) : 0;
  for (int r = 0; r < kChunk && from + r < n; r += kAtOnce) {
    sink.load(from + r);
    Sums<T> y[kAtOnce] = {};
    if (even) {
      if (hi_goes) add_rows<T>(x, next, r, end, of_up, y);
      const Sums<T> bases{Sum<T>(up.base.x - down.base.x), Sum<T>(up.base.y - down.base.y)};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        up.part = up.part + y[i];
        y[i] = bases + (up.part - down.part);
      }
      if (lo_goes) {
        Sums<T> less[kAtOnce] = {}, sum = {};
        add_rows<T>(x, first_lo, r, end, of_down, less);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) y[i] = y[i] - sum, sum = sum + less[i];
        down.part = down.part + sum;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kAtOnce; ++i) {
        const int to = __shfl_sync(kAll, hi, r + i), begin = __shfl_sync(kAll, lo, r + i);
        up.go_to(to), down.go_to(begin);
        const Sums<T> bases{Sum<T>(up.base.x - down.base.x), Sum<T>(up.base.y - down.base.y)};
        const Sums<T> sum = bases + (up.part - down.part);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
          if (j == i) y[j] = sum;
      }
    }
    const bool empty = hi <= lo;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (__shfl_sync(kAll, empty, r + i)) y[i] = {};
    sink.take(from + r, y);
  }
}

// [head of keys][chunk]: behind each chunk, so that 0 stands before the first.
__device__ inline double* sums_of(const Centre& f, int rows, int head, int channel) {
  return f.sums + int64_t(head) * (chunks(rows) + 1) * f.D + channel;
}

template <template <class> class Rows, class T>
__global__ __launch_bounds__(kCentreThreads, kCentreBlocks<T>) void chunk_sums_kernel(
    const __grid_constant__ Centre f) {
  const int n = Rows<T>::rows(f);
  const CentrePlace at(f, chunks(n), groups(f));
  if (at.index >= f.B * f.G) return;
  const Rows<T> x(f, at.index, at.channel);
  const int from = at.chunk * kChunk;
  const float own = x.factor(0, from + lane());
  Sums<T> rows[kAtOnce] = {};
  for (int r = 0; r < kChunk && from + r < n; r += kAtOnce) add_rows<T>(x, from, r, n, own, rows);
  Sums<T> sum = {};
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) sum = sum + rows[i];
  double* const to = sums_of(f, n, at.index, at.channel) + (int64_t(at.chunk) + 1) * f.D;
  if (at.real) *reinterpret_cast<double2*>(to) = make_double2(sum.x, sum.y);
}

// From sums of chunks to those of all chunks before: a lane for each channel, a warp for each
// segment of the chunks.
__global__ __launch_bounds__(32 * kSegments) void scan_kernel(const __grid_constant__ Centre f,
                                                              int rows) {
  __shared__ double parts[kSegments][32];
  const int n = chunks(rows), each = (n + kSegments - 1) / kSegments;
  const int c = int(blockIdx.y) * 32 + lane(), first = 1 + warp() * each;
  const int end = c < f.D ? min(first + each, n + 1) : 0;
  double* const at = sums_of(f, rows, int(blockIdx.x), c);
  const auto over_chunks = [&](const auto& each_one) {
    for (int i = first; i < end; i += 8) {
      double x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = i + j < end ? at[int64_t(i + j) * f.D] : 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) each_one(i + j, x[j]);
    }
  };
  double sum = 0;
  over_chunks([&](int, double x) { sum += x; });
  parts[warp()][lane()] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < warp(); ++i) sum += parts[i][lane()];
  if (warp() == 0 && c < f.D) at[0] = 0;
  over_chunks([&](int i, double x) {
    sum += x;
    if (i < end) at[int64_t(i) * f.D] = sum;
  });
}

// Lane i gets the sum over the lanes of x[i % kAtOnce].
__device__ inline float sum_of_lanes(float (&x)[kAtOnce]) {
#pragma unroll
  for (int step = kAtOnce / 2; step > 0; step /= 2) {
    const bool upper = lane() & step;
#pragma unroll
    for (int i = 0; i < step; ++i)
      x[i] = (upper ? x[i + step] : x[i]) + __shfl_xor_sync(kAll, upper ? x[i] : x[i + step], step);
  }
#pragma unroll
  for (int step = kAtOnce; step < 32; step *= 2) x[0] += __shfl_xor_sync(kAll, x[0], step);
  return x[0];
}

// The product of each query with its sum; that of query `from + lane` is the lane's.
template <class T>
struct Products {
  const Centre& f;
  int from;
  const T* q;  // the head's, from the lane's channels on
  bool real;
  float dot = 0;
  Two<T> rows[kAtOnce];

  __device__ void load(int t) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      rows[i] = *reinterpret_cast<const Two<T>*>(q + min(t + i, f.T - 1) * f.q.row);
  }
  __device__ void take(int t, const Sums<T> (&sums)[kAtOnce]) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      x[i] = real ? float(rows[i].x) * float(sums[i].x) + float(rows[i].y) * float(sums[i].y) : 0;
    const float y = sum_of_lanes(x);  // every eighth lane's is the same
    if (lane() / kAtOnce == (t - from) / kAtOnce) dot += y;
  }
};
template <class T>
__global__ __launch_bounds__(kCentreThreads, kCentreBlocks<T>) void centre_kernel(
    const __grid_constant__ Centre f) {
  CentrePlace at(f, chunks(f.T), 1);
  if (at.index >= f.B * f.H) return;
  const int b = at.index / f.H, h = at.index % f.H, head = b * f.G + h / (f.H / f.G);
  const int from = at.chunk * kChunk, t = min(from + lane(), f.T - 1);
  const int lo = f.seen.lo(t), hi = f.seen.hi(t);
  float dot = 0;
  for (int i = 0; i < groups(f); ++i) {
    at.set_group(f, i);
    Products<T> sink{f, from, channels_of<const T>(f.q, b, h, at.channel), at.real};
    over_intervals<T>(Keys<T>(f, head, at.channel), sums_of(f, f.S, head, at.channel), from, f.T,
                      lo, hi, sink);
    dot += sink.dot;
  }
  if (from + lane() < f.T)
    f.centre[int64_t(at.index) * f.T + t] = f.scale * dot / count_of(f, b, t);
}

// Adds to the rows of a head the sums, each times the factor of its row, which a lane has.
template <class T, class From>
struct Additions {
  const From* given;  // from the lane's channels on
  T* to;
  int from, n, D;
  bool real;
  float factor;
  Two<From> rows[kAtOnce];

  __device__ void load(int first) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      rows[i] = *reinterpret_cast<const Two<From>*>(given + int64_t(min(first + i, n - 1)) * D);
  }
  __device__ void take(int first, const Sums<T> (&sums)[kAtOnce]) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float by = __shfl_sync(kAll, factor, first - from + i);
      const float x = float(rows[i].x) + by * float(sums[i].x);
      const float y = float(rows[i].y) + by * float(sums[i].y);
      if (real && first + i < n)
        *reinterpret_cast<Two<T>*>(to + int64_t(first + i) * D) = {T(x), T(y)};
    }
  }
};
template <class T, class From>
__global__ __launch_bounds__(kCentreThreads, kCentreBlocks<T>) void centre_dq_kernel(
    const __grid_constant__ Centre f) {
  const CentrePlace at(f, chunks(f.T), groups(f));
  if (at.index >= f.B * f.H) return;
  const int b = at.index / f.H, head = b * f.G + at.index % f.H / (f.H / f.G);
  const int from = at.chunk * kChunk, t = min(from + lane(), f.T - 1);
  const int64_t first = int64_t(at.index) * f.T * f.D + at.channel;
  const auto* const given = static_cast<const From*>(f.dq_sum ? f.dq_sum : f.dq);
  const float factor = f.scale * f.d_centre[int64_t(at.index) * f.T + t] / count_of(f, b, t);
  Additions<T, From> sink{given + first, static_cast<T*>(f.dq) + first, from, f.T, f.D, at.real,
                          factor};
  over_intervals<T>(Keys<T>(f, head, at.channel), sums_of(f, f.S, head, at.channel), from, f.T,
                    f.seen.lo(t), f.seen.hi(t), sink);
}
template <class T>
__global__ __launch_bounds__(kCentreThreads, kCentreBlocks<T>) void centre_dk_kernel(
    const __grid_constant__ Centre f) {
  const CentrePlace at(f, chunks(f.S), groups(f));
  if (at.index >= f.B * f.G) return;
  const int from = at.chunk * kChunk, s = min(from + lane(), f.S - 1);
  const int64_t first = int64_t(at.index) * f.S * f.D + at.channel;
  T* const dk = static_cast<T*>(f.dk) + first;
  const bool kept = !f.seen.keep || f.seen.keep[int64_t(at.index / f.G) * f.S + s];
  Additions<T, T> sink{dk, dk, from, f.S, f.D, at.real, kept ? f.scale : 0};
  over_intervals<T>(Queries<T>(f, at.index, at.channel), sums_of(f, f.T, at.index, at.channel),
                    from, f.S, f.seen.first_query(s), f.seen.end_query(s + 1), sink);
}

// A warp for each of so many chunks.
static void start(void (*kernel)(Centre), int64_t chunks, const Centre& f, Stream stream) {
  launch(kernel, {blocks(chunks, kCentreWarps), 1, kCentreThreads, 0}, stream, f);
}
template <template <class> class Rows, class T>
static void sum_chunks(const Centre& f, Stream stream) {
  const int rows = Rows<T>::rows(f), heads = f.B * f.G;
  start(chunk_sums_kernel<Rows, T>, int64_t(heads) * chunks(rows) * groups(f), f, stream);
  launch(scan_kernel, {heads, blocks(f.D, 32), 32 * kSegments, 0}, stream, f, rows);
}

template <class T>
static void forward(const Centre& f, Stream stream) {
  sum_chunks<Keys, T>(f, stream);
  start(centre_kernel<T>, int64_t(f.B) * f.H * chunks(f.T), f, stream);
}
template <class T>
static void backward(const Centre& f, Stream stream) {
  const int64_t queries = int64_t(f.B) * f.H * chunks(f.T) * groups(f);
  sum_chunks<Queries, T>(f, stream);
  start(centre_dk_kernel<T>, int64_t(f.B) * f.G * chunks(f.S) * groups(f), f, stream);
  sum_chunks<Keys, T>(f, stream);
  start(f.dq_sum ? centre_dq_kernel<T, float> : centre_dq_kernel<T, T>, queries, f, stream);
}

int64_t centre_scratch(const Centre& f) {
  return int64_t(f.B) * f.G * f.D * (chunks(std::max(f.T, f.S)) + 1);
}
void centre_forward(const Centre& f, Stream stream) {
  const auto run = f.dtype == Dtype::bfloat16  ? forward<bf16>
                   : f.dtype == Dtype::float16 ? forward<fp16>
                                               : forward<float>;
  if (f.B > 0 && f.T > 0 && f.S > 0) run(f, stream);
}
void centre_backward(const Centre& f, Stream stream) {
  const auto run = f.dtype == Dtype::bfloat16  ? backward<bf16>
                   : f.dtype == Dtype::float16 ? backward<fp16>
                                               : backward<float>;
  if (f.B > 0 && f.T > 0 && f.S > 0) run(f, stream);
}

}  // namespace horner::attn::kernels::cuda

// Kernels of the mean scores: chunk sums, their prefix sums, then the users of interval sums
// (interval_sums.cuh): products with queries, and additions to gradients.
#include <algorithm>

#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/prepare/interval_sums.cuh"

namespace horner::attn::kernels::cuda {

// [key head][chunk + 1]: the sum up to the end of each chunk; entry 0 is 0.
__device__ inline double* sums_of(const Centre& f, int rows, int head, int channel) {
  return f.sums + int64_t(head) * (chunks(rows) + 1) * f.D + channel;
}

template <template <class> class Rows, class T>
__global__ __launch_bounds__(kCentreThreads, kCentreBlocks<T>) void centre_chunk_sums_kernel(
    const __grid_constant__ Centre f) {
  const int n = Rows<T>::rows(f);
  const CentreIndex at(f, chunks(n), groups(f));
  if (at.index >= f.B * f.G) return;
  const Rows<T> x(f, at.index, at.channel);
  const int from = at.chunk * kChunk;
  RowBatch<Rows<T>> run(x, from, n);
  Sums<T> rows[kBatch] = {}, sum = {};
#pragma unroll
  for (int r = 0; r < kChunk; r += kBatch) run.add(r, rows);
#pragma unroll
  for (int i = 0; i < kBatch; ++i) sum = sum + rows[i];
  double* const to = sums_of(f, n, at.index, at.channel) + (int64_t(at.chunk) + 1) * f.D;
  if (at.real) *reinterpret_cast<double2*>(to) = make_double2(sum.x, sum.y);
}

// From chunk sums to prefix sums: one lane per channel, one warp per segment of chunks.
__global__ __launch_bounds__(kSegmentThreads) void centre_scan_kernel(
    const __grid_constant__ Centre f, int rows) {
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

// Lane i gets the sum over all lanes of x[i % kBatch].
__device__ inline float sum_of_lanes(float (&x)[kBatch]) {
#pragma unroll
  for (int step = kBatch / 2; step > 0; step /= 2) {
    const bool upper = lane() & step;
#pragma unroll
    for (int i = 0; i < step; ++i)
      x[i] = (upper ? x[i + step] : x[i]) + __shfl_xor_sync(kAll, upper ? x[i] : x[i + step], step);
  }
#pragma unroll
  for (int step = kBatch; step < 32; step *= 2) x[0] += __shfl_xor_sync(kAll, x[0], step);
  return x[0];
}

// The product of each query with its sum; lane i keeps that of query `from + i`.
template <class T>
struct Products {
  const Centre& f;
  int from;
  HeadRows<T> q;
  float on;  // 1, or 0 for a lane without channels
  float dot = 0;
  float2 rows[kBatch];

  __device__ void load(int t) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) rows[i] = load2(q[min(t + i, f.T - 1)]);
  }
  __device__ void take(int t, const Sums<T> (&sums)[kBatch]) {
    float x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      x[i] = on * (rows[i].x * float(sums[i].x) + rows[i].y * float(sums[i].y));
    const float y = sum_of_lanes(x);  // equal in every eighth lane
    if (lane() / kBatch == (t - from) / kBatch) dot += y;
  }
};
template <class T>
__global__ __launch_bounds__(kCentreThreads, kCentreBlocks<T>) void centre_forward_kernel(
    const __grid_constant__ Centre f) {
  CentreIndex at(f, chunks(f.T), 1);
  if (at.index >= f.B * f.H) return;
  const int b = at.index / f.H, h = at.index % f.H, head = b * f.G + h / (f.H / f.G);
  const int from = at.chunk * kChunk, t = min(from + lane(), f.T - 1);
  const int lo = f.seen.lo(t), hi = f.seen.hi(t);
  float dot = 0;
  for (int i = 0; i < groups(f); ++i) {
    at.set_group(f, i);
    Products<T> sink{f, from, HeadRows<T>(f.q, b, h, at.channel), at.real ? 1.f : 0.f};
    over_intervals<T>(Keys<T>(f, head, at.channel), sums_of(f, f.S, head, at.channel), from, f.T,
                      lo, hi, sink);
    dot += sink.dot;
  }
  if (from + lane() < f.T)
    f.centre[int64_t(at.index) * f.T + t] = f.scale * dot / count_of(f, b, t);
}

// Adds the sums to a head's rows, each times its row's factor, which one lane holds.
template <class T, class From>
struct Additions {
  const From* given;  // at the lane's channels
  T* to;
  int from, n, D;
  bool real;
  float factor;
  float2 rows[kBatch];

  __device__ void load(int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) rows[i] = load2(given + int64_t(min(first + i, n - 1)) * D);
  }
  __device__ void take(int first, const Sums<T> (&sums)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float by = __shfl_sync(kAll, factor, first - from + i);
      const float x = rows[i].x + by * float(sums[i].x);
      const float y = rows[i].y + by * float(sums[i].y);
      if (real && first + i < n) store_pair<T>(to, int64_t(first + i) * D, x, y);
    }
  }
};
template <class T, class From>
__global__ __launch_bounds__(kCentreThreads, kCentreBlocks<T>) void centre_dq_kernel(
    const __grid_constant__ Centre f) {
  const CentreIndex at(f, chunks(f.T), groups(f));
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
  const CentreIndex at(f, chunks(f.S), groups(f));
  if (at.index >= f.B * f.G) return;
  const int from = at.chunk * kChunk, s = min(from + lane(), f.S - 1);
  const int64_t first = int64_t(at.index) * f.S * f.D + at.channel;
  T* const dk = static_cast<T*>(f.dk) + first;
  const bool kept = !f.seen.keep || f.seen.keep[int64_t(at.index / f.G) * f.S + s];
  Additions<T, T> sink{dk, dk, from, f.S, f.D, at.real, kept ? f.scale : 0};
  over_intervals<T>(Queries<T>(f, at.index, at.channel), sums_of(f, f.T, at.index, at.channel),
                    from, f.S, f.seen.first_query(s), f.seen.end_query(s + 1), sink);
}

// One warp per chunk.
static void start(void (*kernel)(Centre), int64_t chunks, const Centre& f, Stream stream) {
  launch(kernel, {ceil_div(chunks, kCentreWarps), 1, kCentreThreads, 0}, stream, f);
}
template <template <class> class Rows, class T>
static void sum_chunks(const Centre& f, Stream stream) {
  const int rows = Rows<T>::rows(f), heads = f.B * f.G;
  start(centre_chunk_sums_kernel<Rows, T>, int64_t(heads) * chunks(rows) * groups(f), f, stream);
  launch(centre_scan_kernel, {heads, ceil_div(f.D, 32), kSegmentThreads, 0}, stream, f, rows);
}

template <class T>
static void forward(const Centre& f, Stream stream) {
  sum_chunks<Keys, T>(f, stream);
  start(centre_forward_kernel<T>, int64_t(f.B) * f.H * chunks(f.T), f, stream);
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
// Calls with(T()) for the dtype, unless the problem is empty.
template <class F>
static void run(const Centre& f, const F& with) {
  if (f.B == 0 || f.T == 0 || f.S == 0) return;
  with_dtype(f.dtype, with);
}
void centre_forward(const Centre& f, Stream stream) {
  run(f, [&]<class T>(T) { forward<T>(f, stream); });
}
void centre_backward(const Centre& f, Stream stream) {
  run(f, [&]<class T>(T) { backward<T>(f, stream); });
}

}  // namespace horner::attn::kernels::cuda

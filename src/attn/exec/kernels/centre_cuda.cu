// A thread has a channel, a block a chunk of rows. P(j), the sum of the rows before j, is that of
// the chunks before, from memory, and of some rows of the next: the sum over [lo, hi) is
// P(hi) - P(lo), and as lo and hi never go back, each row is added once.
#include <algorithm>

#include "attn/exec/kernels/centre_cuda.h"
#include "attn/exec/kernels/fused_cuda_launch.cuh"

namespace horner::attn::kernels::cuda {

constexpr int kChunk = 32;  // rows

HORNER_HD int chunks(int rows) {
  return (rows + kChunk - 1) / kChunk;
}

// Keys, 0 where hidden.
template <class T>
struct Keys {
  const Centre& f;
  int b, g;

  __device__ int rows() const { return f.S; }
  __device__ double at(int s, int c) const {
    if (f.seen.keep && !f.seen.keep[int64_t(b) * f.S + s]) return 0;
    return float(static_cast<const T*>(f.k.at)[b * f.k.batch + g * f.k.head + s * f.k.row + c]);
  }
};
__device__ inline float count_of(const Centre& f, int b, int t) {
  return f.count ? f.count[int64_t(b) * f.T + t] : float(max(f.seen.hi(t) - f.seen.lo(t), 1));
}
// Queries of a group's heads, each times the gradient of its centre over the count.
template <class T>
struct Queries {
  const Centre& f;
  int b, g;

  __device__ int rows() const { return f.T; }
  __device__ double at(int t, int c) const {
    double sum = 0;
    for (int h = g * (f.H / f.G); h < (g + 1) * (f.H / f.G); ++h) {
      const float d = f.d_centre[(int64_t(b) * f.H + h) * f.T + t] / count_of(f, b, t);
      const T* const q = static_cast<const T*>(f.q.at) + b * f.q.batch + h * f.q.head;
      sum += double(d) * double(float(q[t * f.q.row + c]));
    }
    return sum;
  }
};

// [head of keys][chunk]: behind each chunk, so that 0 stands before the first.
template <class Rows>
__device__ inline double* sums_of(const Centre& f, const Rows& x) {
  return f.sums + int64_t(blockIdx.y) * (chunks(x.rows()) + 1) * f.D;
}

template <template <class> class Rows, class T>
__global__ void chunk_sums_kernel(const __grid_constant__ Centre f) {
  const Rows<T> x{f, int(blockIdx.y) / f.G, int(blockIdx.y) % f.G};
  const int c = int(threadIdx.x), from = int(blockIdx.x) * kChunk;
  if (c >= f.D) return;
  double sum = 0;
#pragma unroll 8
  for (int j = 0; j < kChunk; ++j)
    if (from + j < x.rows()) sum += x.at(from + j, c);
  sums_of(f, x)[(int64_t(blockIdx.x) + 1) * f.D + c] = sum;
}

template <template <class> class Rows, class T>
__global__ void scan_kernel(const __grid_constant__ Centre f) {
  const Rows<T> x{f, 0, 0};
  const int c = int(threadIdx.x);
  if (c >= f.D) return;
  double* const at = sums_of(f, x) + c;
  double sum = 0;
  at[0] = 0;
#pragma unroll 8
  for (int i = 1; i <= chunks(x.rows()); ++i) at[int64_t(i) * f.D] = sum += at[int64_t(i) * f.D];
}

// P(j) of a channel, for j that never go back.
template <class Rows>
struct Before {
  const Centre& f;
  const Rows& x;
  int c, at = -1;
  double sum = 0;

  __device__ double operator()(int j) {
    if (at < 0 || j / kChunk > at / kChunk) {
      at = j / kChunk * kChunk;
      sum = sums_of(f, x)[int64_t(j / kChunk) * f.D + c];
    }
    for (; at < j; ++at) sum += x.at(at, c);
    return sum;
  }
};

// The mean of the keys that each query of a chunk sees, given to `sink(t, mean)`.
template <class T, class Sink>
__device__ inline void over_means(const Centre& f, int b, const Sink& sink) {
  const Keys<T> keys{f, b, int(blockIdx.y) % f.G};
  const int c = int(threadIdx.x), from = int(blockIdx.x) * kChunk;
  Before<Keys<T>> lo{f, keys, c}, hi{f, keys, c};
  for (int t = from; t < min(from + kChunk, f.T); ++t) {
    const int first = f.seen.lo(t), end = f.seen.hi(t);
    const double sum = first < end ? hi(end) - lo(first) : 0;
    sink(t, float(sum / double(count_of(f, b, t))));
  }
}

template <class T>
__global__ void centre_kernel(const __grid_constant__ Centre f) {
  __shared__ float means[kChunk][kMostChannels];
  const int b = int(blockIdx.y) / f.G, g = int(blockIdx.y) % f.G, repeats = f.H / f.G;
  const int from = int(blockIdx.x) * kChunk, c = int(threadIdx.x);
  if (c < f.D) over_means<T>(f, b, [&](int t, float mean) { means[t - from][c] = mean; });
  __syncthreads();
  const int rows = min(kChunk, f.T - from) * repeats, lane = int(threadIdx.x) % 32;
  for (int i = int(threadIdx.x) / 32; i < rows; i += int(blockDim.x) / 32) {
    const int t = from + i / repeats, h = g * repeats + i % repeats;
    const T* const q = static_cast<const T*>(f.q.at) + b * f.q.batch + h * f.q.head + t * f.q.row;
    float dot = 0;
    for (int j = lane; j < f.D; j += 32) dot += float(q[j]) * means[t - from][j];
    for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(~0u, dot, step);
    if (lane == 0) f.centre[(int64_t(b) * f.H + h) * f.T + t] = f.scale * dot;
  }
}

template <class T>
__global__ void centre_dq_kernel(const __grid_constant__ Centre f) {
  const int b = int(blockIdx.y) / f.G, g = int(blockIdx.y) % f.G, c = int(threadIdx.x);
  if (c >= f.D) return;
  over_means<T>(f, b, [&](int t, float mean) {
    for (int h = g * (f.H / f.G); h < (g + 1) * (f.H / f.G); ++h) {
      const int64_t row = (int64_t(b) * f.H + h) * f.T + t;
      static_cast<T*>(f.dq)[row * f.D + c] = T(f.scale * f.d_centre[row] * mean);
    }
  });
}

template <class T>
__global__ void centre_dk_kernel(const __grid_constant__ Centre f) {
  const int b = int(blockIdx.y) / f.G, c = int(threadIdx.x), from = int(blockIdx.x) * kChunk;
  if (c >= f.D) return;
  const Queries<T> queries{f, b, int(blockIdx.y) % f.G};
  Before<Queries<T>> lo{f, queries, c}, hi{f, queries, c};
  for (int s = from; s < min(from + kChunk, f.S); ++s) {
    const int first = f.seen.first_query(s), end = f.seen.end_query(s + 1);
    const bool seen = first < end && !(f.seen.keep && !f.seen.keep[int64_t(b) * f.S + s]);
    const double sum = seen ? hi(end) - lo(first) : 0;
    static_cast<T*>(f.dk)[(int64_t(blockIdx.y) * f.S + s) * f.D + c] = T(float(f.scale * sum));
  }
}

// A block for each chunk and each head of keys; a thread for each channel.
static void start(void (*kernel)(Centre), int blocks, const Centre& f, Stream stream) {
  launch(kernel, {blocks, f.B * f.G, (f.D + 31) / 32 * 32, 0}, stream, f);
}

template <template <class> class Rows, class T>
static void sum_chunks(int rows, const Centre& f, Stream stream) {
  start(chunk_sums_kernel<Rows, T>, chunks(rows), f, stream);
  start(scan_kernel<Rows, T>, 1, f, stream);
}

template <class T>
static void forward(const Centre& f, Stream stream) {
  sum_chunks<Keys, T>(f.S, f, stream);
  start(centre_kernel<T>, chunks(f.T), f, stream);
}
template <class T>
static void backward(const Centre& f, Stream stream) {
  sum_chunks<Keys, T>(f.S, f, stream);
  start(centre_dq_kernel<T>, chunks(f.T), f, stream);
  sum_chunks<Queries, T>(f.T, f, stream);
  start(centre_dk_kernel<T>, chunks(f.S), f, stream);
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

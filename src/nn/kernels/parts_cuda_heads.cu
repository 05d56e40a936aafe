// Heads on CUDA: splits rows (q | k | v) into q, k and v of each head, with optional norm and
// rotary embedding; and the backward.
#include "nn/kernels/parts_cuda.cuh"

namespace horner::nn::kernels::cuda {

// Rotary embedding rotates pairs of channels (i, i + D / 2) of a head; kPairs of them per lane.
inline constexpr int kPairs = int(kMostHeadChannels / 64), kWarps = 8;

// Values, not pointers into the kernel parameters, which would force a copy to local memory.
struct HeadOf {
  void* at;
  int64_t batch, head, token;
  const float* weight;
  bool is_k, turned;
  int64_t index;
};
__device__ inline HeadOf head_of(const Heads& p, int64_t h) {
  const bool is_q = h < p.H, is_k = !is_q && h < p.H + p.G;
  const auto of = [&](auto q, auto k, auto v) { return is_q ? q : is_k ? k : v; };
  const float* const none = nullptr;
  return {of(p.q.at, p.k.at, p.v.at),         of(p.q.batch, p.k.batch, p.v.batch),
          of(p.q.head, p.k.head, p.v.head),   of(p.q.token, p.k.token, p.v.token),
          of(p.q_norm, p.k_norm, none),       is_k,
          (is_q || is_k) && p.cos != nullptr, h - of(int64_t(0), p.H, p.H + p.G)};
}
// Batch and token of a row, in 32 bits: a 64-bit division takes longer than the rest here.
struct Row {
  int64_t row;
  unsigned b, t;
};
__device__ inline Row row_of(const Heads& p, int64_t row) {
  const unsigned r = unsigned(row), T = unsigned(p.T);
  return {row, r / T, r % T};
}
template <class T>
__device__ inline T* place(const HeadOf& o, const Row& r) {
  return at<T>(o.at, r.b * o.batch + o.index * o.head + r.t * o.token);
}
struct Pair {
  float a, b;
};
__device__ inline Pair turned(Pair x, float cos, float sin) {
  return {x.a * cos - x.b * sin, x.b * cos + x.a * sin};
}

// One thread block per row; each thread takes N consecutive pairs of a head. `back`: from the
// gradients of q, k and v to that of x, without norms.
template <class T, int N, bool back>
__global__ void heads_rows(const Heads p) {
  extern __shared__ float rstds[];  // [H + G], of the norms
  const int H = int(p.H), G = int(p.G), all = H + 2 * G, half = int(p.D) / 2, each = half / N;
  const Row r = row_of(p, blockIdx.x);
  const T* rows = at<T>(p.x, r.row * p.x_row);
  if (!back && p.q_norm) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int h = warp; h < H + G; h += int(blockDim.x) / 32) {
      float squares = 0;
      for (int i = lane; i < p.D; i += 32)
        squares += wide(rows[h * p.D + i]) * wide(rows[h * p.D + i]);
      const float rstd = 1 / sqrtf(warp_sum(squares) / float(p.D) + p.eps);
      if (lane == 0) rstds[h] = p.rstd[r.row * (H + G) + h] = rstd;
    }
    __syncthreads();
  }
  for (int n = int(threadIdx.x); n < all * each; n += int(blockDim.x)) {
    const int h = n / each, i = n % each * N;
    const HeadOf o = head_of(p, h);
    T* out = place<T>(o, r);
    T* const x = back ? at<T>(p.d_x, (r.row * all + h) * p.D) : const_cast<T*>(rows) + h * p.D;
    const T* const from = back ? out : x;
    T* const to = back ? x : out;
    Pack<N> a = get<N>(from + i), b = get<N>(from + i + half);
    if (!back && o.weight) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        a.x[j] *= rstds[h] * (o.weight[i + j] + p.plus);
        b.x[j] *= rstds[h] * (o.weight[i + j + half] + p.plus);
      }
    }
    if (o.turned) {
      const Pack<N> cos = get<N>(p.cos + int64_t(r.t) * half + i),
                    sin = get<N>(p.sin + int64_t(r.t) * half + i);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Pair y = turned({a.x[j], b.x[j]}, cos.x[j], back ? -sin.x[j] : sin.x[j]);
        a.x[j] = y.a, b.x[j] = y.b;
      }
    }
    put<N>(to + i, a), put<N>(to + i + half, b);
  }
}

// One thread block per task of rows; its warps take the heads in turn. Their sums are added in warp
// order: deterministic.
template <class T>
__global__ void heads_rows_backward(const Heads p) {
  __shared__ float shared[kWarps][kMostHeadChannels];
  const int64_t all = p.H + 2 * p.G, half = p.D / 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Pair sums[2][kPairs] = {};
  const int64_t from = blockIdx.x * p.rows.each, to = min(from + p.rows.each, p.rows.count);
  for (int64_t item = from * all + warp; item < to * all; item += kWarps) {
    const int64_t row = unsigned(item) / unsigned(all), h = unsigned(item) % unsigned(all);
    const Row r = row_of(p, row);
    const int64_t angle = r.t * half;
    const HeadOf o = head_of(p, h);
    const T* d_y = place<T>(o, r);
    const T* x = at<T>(p.x, row * p.x_row + h * p.D);
    T* d_x = at<T>(p.d_x, (row * all + h) * p.D);
    const float rstd = o.weight ? p.rstd[row * (p.H + p.G) + h] : 1;
    Pair d[kPairs], u[kPairs];
    float mean = 0;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int64_t i = lane + 32 * j;
      if (i >= half) break;
      d[j] = {wide(d_y[i]), wide(d_y[i + half])};
      if (o.turned) d[j] = turned(d[j], p.cos[angle + i], -p.sin[angle + i]);
      if (!o.weight) continue;
      u[j] = {wide(x[i]) * rstd, wide(x[i + half]) * rstd};
      Pair& sum = sums[o.is_k][j];
      sum.a += d[j].a * u[j].a, sum.b += d[j].b * u[j].b;
      d[j].a *= o.weight[i] + p.plus, d[j].b *= o.weight[i + half] + p.plus;
      mean += d[j].a * u[j].a + d[j].b * u[j].b;
    }
    if (o.weight) mean = warp_sum(mean) / float(p.D);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int64_t i = lane + 32 * j;
      if (i >= half) break;
      if (o.weight) d[j] = {(d[j].a - u[j].a * mean) * rstd, (d[j].b - u[j].b * mean) * rstd};
      d_x[i] = narrow<T>(d[j].a), d_x[i + half] = narrow<T>(d[j].b);
    }
  }
  if (!p.q_norm) return;
  for (int which = 0; which < 2; ++which) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int64_t i = lane + 32 * j;
      if (i >= half) break;
      shared[warp][i] = sums[which][j].a, shared[warp][i + half] = sums[which][j].b;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < p.D; i += blockDim.x) {
      float sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += shared[w][i];
      (which ? p.d_k_norm : p.d_q_norm)[blockIdx.x * p.D + i] = sum;
    }
  }
}

template <bool back>
static void launch_rows(const Heads& p, Stream stream) {
  const bool four = fours({p.D / 2, p.x_row, p.q.batch, p.q.head, p.q.token, p.k.batch, p.k.head,
                           p.k.token, p.v.batch, p.v.head, p.v.token},
                          {p.x, p.q.at, p.k.at, p.v.at, p.d_x, p.cos, p.sin});
  with(p.dtype, [&](auto T) {
    with_width(four, [&](auto N) {
      const unsigned threads = threads_for(4 * (p.H + 2 * p.G) * (p.D / 2), N.value, 256);
      heads_rows<decltype(T), N.value, back>
          <<<unsigned(p.rows.count), threads, size_t(p.H + p.G) * 4, stream>>>(p);
    });
  });
}
void heads(const Heads& p, Stream stream) {
  launch_rows<false>(p, stream);
}
void heads_backward(const Heads& p, Stream stream) {
  if (!p.q_norm) return launch_rows<true>(p, stream);
  with(p.dtype, [&](auto T) {
    heads_rows_backward<decltype(T)><<<unsigned(p.rows.tasks()), kWarps * 32, 0, stream>>>(p);
  });
}

}  // namespace horner::nn::kernels::cuda

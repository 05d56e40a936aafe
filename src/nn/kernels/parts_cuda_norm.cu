// Norms and heads on CUDA: a block or a warp for each row, sums in a fixed order.
#include "nn/kernels/parts_cuda.cuh"

namespace horner::nn::kernels::cuda {

template <class R, class A, int N>
__global__ void norm_rows(const Norm p) {
  const int64_t r = blockIdx.x, first = threadIdx.x * N, step = blockDim.x * N;
  const R* x = at<R>(p.x, r * p.x_row);
  float total = 0;
  if (p.added) {
    const A* added = at<A>(p.added, r * p.added_row);
    R* sum = at<R>(p.sum, r * p.C);
    for (int64_t c = first; c < p.C; c += step) {
      Pack<N> a = get<N>(x + c);
      const Pack<N> b = get<N>(added + c);
      for (int i = 0; i < N; ++i) a.x[i] += b.x[i];
      put<N>(sum + c, a);
    }
    x = sum;  // each thread reads again what it wrote
  }
  float mean = 0;
  if (p.layer) {
    for (int64_t c = first; c < p.C; c += step) {
      const Pack<N> a = get<N>(x + c);
      for (int i = 0; i < N; ++i) total += a.x[i];
    }
    mean = block_sum(total) / float(p.C);
  }
  float squares = 0;
  for (int64_t c = first; c < p.C; c += step) {
    const Pack<N> a = get<N>(x + c);
    for (int i = 0; i < N; ++i) squares += (a.x[i] - mean) * (a.x[i] - mean);
  }
  const float rstd = 1 / sqrtf(block_sum(squares) / float(p.C) + p.eps);
  if (threadIdx.x == 0) {
    if (p.layer) p.mean[r] = mean;
    p.rstd[r] = rstd;
  }
  for (int64_t c = first; c < p.C; c += step) {
    Pack<N> a = get<N>(x + c);
    const Pack<N> w = get<N>(p.weight + c);
    for (int i = 0; i < N; ++i) a.x[i] = (a.x[i] - mean) * rstd * (w.x[i] + p.plus);
    if (p.bias)
      for (int i = 0; i < N; ++i) a.x[i] += p.bias[c + i];
    put<N>(at<A>(p.y, r * p.C + c), a);
  }
}

// A block takes the rows of a task; every thread adds up its own channels of the weight's gradient.
template <class R, class A, int N>
__global__ void norm_rows_backward(const Norm p) {
  extern __shared__ float sums[];  // [C], and [C] of the bias
  float* bias_sums = sums + p.C;
  const int64_t first = threadIdx.x * N, step = blockDim.x * N;
  for (int64_t c = first; c < p.C; c += step)
    for (int i = 0; i < N; ++i) {
      sums[c + i] = 0;
      if (p.bias) bias_sums[c + i] = 0;
    }
  const int64_t from = blockIdx.x * p.rows.each, to = min(from + p.rows.each, p.rows.count);
  for (int64_t r = from; r < to; ++r) {
    const R* x = at<R>(p.x, r * p.x_row);
    const A* d_y = at<A>(p.d_y, r * p.d_y_row);
    const float rstd = p.rstd[r], mean = p.layer ? p.mean[r] : 0;
    float g_sum = 0, gu_sum = 0;
    for (int64_t c = first; c < p.C; c += step) {
      const Pack<N> a = get<N>(x + c), d = get<N>(d_y + c), w = get<N>(p.weight + c);
      for (int i = 0; i < N; ++i) {
        const float u = (a.x[i] - mean) * rstd, g = d.x[i] * (w.x[i] + p.plus);
        g_sum += g, gu_sum += g * u;
        sums[c + i] += d.x[i] * u;
        if (p.bias) bias_sums[c + i] += d.x[i];
      }
    }
    const float g_mean = p.layer ? block_sum(g_sum) / float(p.C) : 0;
    const float gu_mean = block_sum(gu_sum) / float(p.C);
    for (int64_t c = first; c < p.C; c += step) {
      const Pack<N> a = get<N>(x + c), d = get<N>(d_y + c), w = get<N>(p.weight + c);
      Pack<N> out;
      for (int i = 0; i < N; ++i) {
        const float u = (a.x[i] - mean) * rstd, g = d.x[i] * (w.x[i] + p.plus);
        out.x[i] = (g - g_mean - u * gu_mean) * rstd;
      }
      if (p.d_sum) {
        const Pack<N> more = get<N>(at<R>(p.d_sum, r * p.d_sum_row + c));
        for (int i = 0; i < N; ++i) out.x[i] += more.x[i];
      }
      put<N>(at<R>(p.d_x, r * p.C + c), out);
      if (p.d_added) put<N>(at<A>(p.d_added, r * p.C + c), out);
    }
  }
  for (int64_t c = first; c < p.C; c += step)
    for (int i = 0; i < N; ++i) {
      p.d_weight[blockIdx.x * p.C + c + i] = sums[c + i];
      if (p.bias) p.d_bias[blockIdx.x * p.C + c + i] = bias_sums[c + i];
    }
}

// A head of a row by one warp: pairs of channels (i, i + D / 2), i = lane, lane + 32, ...
inline constexpr int kPairs = int(kMostHeadChannels / 64), kWarps = 8;

struct HeadOf {
  const Heads4* to;
  const float* weight;
  bool is_k, turned;
  int64_t index;
};
__device__ inline HeadOf head_of(const Heads& p, int64_t h) {
  if (h < p.H) return {&p.q, p.q_norm, false, p.cos != nullptr, h};
  if (h < p.H + p.G) return {&p.k, p.k_norm, true, p.cos != nullptr, h - p.H};
  return {&p.v, nullptr, false, false, h - p.H - p.G};
}
template <class T>
__device__ inline T* place(const Heads& p, const HeadOf& o, int64_t row) {
  return at<T>(o.to->at, row / p.T * o.to->batch + o.index * o.to->head + row % p.T * o.to->token);
}
struct Pair {
  float a, b;
};
__device__ inline Pair turned(Pair x, float cos, float sin) {
  return {x.a * cos - x.b * sin, x.b * cos + x.a * sin};
}

template <class T>
__global__ void heads_rows(const Heads p) {
  const int64_t all = p.H + 2 * p.G, item = blockIdx.x * int64_t(kWarps) + threadIdx.x / 32;
  if (item >= p.rows.count * all) return;
  const int64_t row = item / all, h = item % all, half = p.D / 2, angle = row % p.T * half;
  const HeadOf o = head_of(p, h);
  const T* x = at<T>(p.x, row * p.x_row + h * p.D);
  const int lane = threadIdx.x % 32;
  float rstd = 1;
  if (o.weight) {
    float squares = 0;
    for (int64_t i = lane; i < p.D; i += 32) squares += wide(x[i]) * wide(x[i]);
    rstd = 1 / sqrtf(warp_sum(squares) / float(p.D) + p.eps);
    if (lane == 0) p.rstd[row * (p.H + p.G) + h] = rstd;
  }
  T* to = place<T>(p, o, row);
  for (int64_t i = lane; i < half; i += 32) {
    Pair y{wide(x[i]), wide(x[i + half])};
    if (o.weight) {
      y.a *= rstd * (o.weight[i] + p.plus);
      y.b *= rstd * (o.weight[i + half] + p.plus);
    }
    if (o.turned) y = turned(y, p.cos[angle + i], p.sin[angle + i]);
    to[i] = narrow<T>(y.a), to[i + half] = narrow<T>(y.b);
  }
}

// A block takes the rows of a task, its warps the heads in turn; the sums of the warps are added in
// their order.
template <class T>
__global__ void heads_rows_backward(const Heads p) {
  __shared__ float shared[kWarps][kMostHeadChannels];
  const int64_t all = p.H + 2 * p.G, half = p.D / 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Pair sums[2][kPairs] = {};
  const int64_t from = blockIdx.x * p.rows.each, to = min(from + p.rows.each, p.rows.count);
  for (int64_t item = from * all + warp; item < to * all; item += kWarps) {
    const int64_t row = item / all, h = item % all, angle = row % p.T * half;
    const HeadOf o = head_of(p, h);
    const T* d_y = place<T>(p, o, row);
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

template <class F>
static void with_norm(const Norm& p, const F& f) {
  const bool four = fours({p.C, p.x_row, p.added_row, p.d_y_row, p.d_sum_row},
                          {p.x, p.added, p.weight, p.sum, p.y, p.d_y, p.d_sum, p.d_x, p.d_added});
  with(p.wide, [&](auto R) {
    with(p.narrow, [&](auto A) { with_width(four, [&](auto N) { f(R, A, N); }); });
  });
}
void norm(const Norm& p, Stream stream) {
  with_norm(p, [&](auto R, auto A, auto N) {
    norm_rows<decltype(R), decltype(A), N.value>
        <<<unsigned(p.rows.count), threads_for(p.C, N.value, 512), 0, stream>>>(p);
  });
}
void norm_backward(const Norm& p, Stream stream) {
  with_norm(p, [&](auto R, auto A, auto N) {
    const auto kernel = norm_rows_backward<decltype(R), decltype(A), N.value>;
    const int bytes = int(p.C * 4 * (p.bias ? 2 : 1));
    if (bytes > 40 << 10)
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<unsigned(p.rows.tasks()), threads_for(p.C, N.value, 512), size_t(bytes), stream>>>(p);
  });
}
void heads(const Heads& p, Stream stream) {
  const int64_t items = p.rows.count * (p.H + 2 * p.G);
  with(p.dtype, [&](auto T) {
    heads_rows<decltype(T)><<<unsigned((items + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(p);
  });
}
void heads_backward(const Heads& p, Stream stream) {
  with(p.dtype, [&](auto T) {
    heads_rows_backward<decltype(T)><<<unsigned(p.rows.tasks()), kWarps * 32, 0, stream>>>(p);
  });
}
}  // namespace horner::nn::kernels::cuda

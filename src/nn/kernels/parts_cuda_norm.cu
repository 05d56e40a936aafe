// Norms on CUDA: one thread block or warp per row, sums in a fixed order.
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
    x = sum;  // each thread reads only what it wrote
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

// One thread block per task of rows; each thread sums its own channels of the weight gradient.
template <class R, class A, int N>
__global__ void norm_rows_backward(const Norm p) {
  extern __shared__ float sums[];  // [C] of the weight, [C] of the bias
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

// The same where a row fits in the registers of a warp, P packs of N per lane: the warps of a block
// take its rows in turn, and their sums are added in warp order.
inline constexpr int kRowWarps = 8;
template <class R, class A, int N, int P>
__global__ void norm_warps_backward(const Norm p) {
  extern __shared__ float sums[];  // [C] of the weight, [C] of the bias
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, C = int(p.C);
  Pack<N> w[P], d_w[P] = {}, d_b[P] = {};
#pragma unroll
  for (int j = 0; j < P; ++j) {
    const int c = (lane + 32 * j) * N;
    if (c >= C) break;
    w[j] = get<N>(p.weight + c);
    for (int i = 0; i < N; ++i) w[j].x[i] += p.plus;
  }
  const int64_t from = blockIdx.x * p.rows.each, to = min(from + p.rows.each, p.rows.count);
  for (int64_t r = from + warp; r < to; r += kRowWarps) {
    const R* x = at<R>(p.x, r * p.x_row);
    const A* d_y = at<A>(p.d_y, r * p.d_y_row);
    const float rstd = p.rstd[r], mean = p.layer ? p.mean[r] : 0;
    Pack<N> u[P], g[P];
    float g_sum = 0, gu_sum = 0;
#pragma unroll
    for (int j = 0; j < P; ++j) {
      const int c = (lane + 32 * j) * N;
      if (c >= C) break;
      u[j] = get<N>(x + c), g[j] = get<N>(d_y + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        u[j].x[i] = (u[j].x[i] - mean) * rstd;
        d_w[j].x[i] += g[j].x[i] * u[j].x[i], d_b[j].x[i] += g[j].x[i];
        g[j].x[i] *= w[j].x[i];
        g_sum += g[j].x[i], gu_sum += g[j].x[i] * u[j].x[i];
      }
    }
    const float g_mean = p.layer ? warp_sum(g_sum) / float(C) : 0;
    const float gu_mean = warp_sum(gu_sum) / float(C);
#pragma unroll
    for (int j = 0; j < P; ++j) {
      const int c = (lane + 32 * j) * N;
      if (c >= C) break;
#pragma unroll
      for (int i = 0; i < N; ++i) g[j].x[i] = (g[j].x[i] - g_mean - u[j].x[i] * gu_mean) * rstd;
      if (p.d_sum) {
        const Pack<N> more = get<N>(at<R>(p.d_sum, r * p.d_sum_row + c));
        for (int i = 0; i < N; ++i) g[j].x[i] += more.x[i];
      }
      put<N>(at<R>(p.d_x, r * p.C + c), g[j]);
      if (p.d_added) put<N>(at<A>(p.d_added, r * p.C + c), g[j]);
    }
  }
  for (int turn = 0; turn < kRowWarps; ++turn) {
    __syncthreads();
    if (turn != warp) continue;
#pragma unroll
    for (int j = 0; j < P; ++j) {
      const int c = (lane + 32 * j) * N;
      if (c >= C) break;
      for (int i = 0; i < N; ++i) {
        sums[c + i] = turn ? sums[c + i] + d_w[j].x[i] : d_w[j].x[i];
        if (p.bias) sums[C + c + i] = turn ? sums[C + c + i] + d_b[j].x[i] : d_b[j].x[i];
      }
    }
  }
  __syncthreads();
  for (int c = int(threadIdx.x); c < C; c += kRowWarps * 32) {
    p.d_weight[blockIdx.x * p.C + c] = sums[c];
    if (p.bias) p.d_bias[blockIdx.x * p.C + c] = sums[C + c];
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
    const int bytes = int(p.C * 4 * (p.bias ? 2 : 1));
    const auto by_warps = [&](auto P) {
      norm_warps_backward<decltype(R), decltype(A), N.value, P.value>
          <<<unsigned(p.rows.tasks()), kRowWarps * 32, size_t(bytes), stream>>>(p);
    };
    if (N.value == 4 && p.C <= 4 * 32 * 4) return by_warps(std::integral_constant<int, 4>());
    if (N.value == 4 && p.C <= 4 * 32 * 8) return by_warps(std::integral_constant<int, 8>());
    const auto kernel = norm_rows_backward<decltype(R), decltype(A), N.value>;
    if (bytes > 40 << 10)
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    kernel<<<unsigned(p.rows.tasks()), threads_for(p.C, N.value, 512), size_t(bytes), stream>>>(p);
  });
}
}  // namespace horner::nn::kernels::cuda

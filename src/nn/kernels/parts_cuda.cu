// Activations and the loss on CUDA; formulas in parts.h.
#include "nn/kernels/parts_cuda.cuh"

namespace horner::nn::kernels::cuda {

inline constexpr float kGelu = 1.5957691216057308f, kCube = 0.044715f;  // 2 sqrt(2 / pi)

__device__ inline float share(float x, bool gelu) {  // 1 / (1 + e^-z)
  const float z = gelu ? x * (x * x * kCube + 1) * kGelu : x;
  return 1 / (1 + expf(-z));
}
template <class T, int N>
__global__ void gated_rows(const Gated p) {
  const int64_t i = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * N;
  if (i >= p.rows.count * p.M) return;
  const int64_t r = i / p.M, c = i % p.M;
  const T* x = at<T>(p.x, r * p.x_row + c);
  Pack<N> y = get<N>(x), up{};
  if (p.gated) up = get<N>(x + p.M);
  for (int j = 0; j < N; ++j) y.x[j] *= share(y.x[j], p.gelu) * (p.gated ? up.x[j] : 1);
  put<N>(at<T>(p.y, i), y);
}
template <class T, int N>
__global__ void gated_rows_backward(const Gated p) {
  const int64_t i = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * N;
  if (i >= p.rows.count * p.M) return;
  const int64_t r = i / p.M, c = i % p.M;
  const T* x = at<T>(p.x, r * p.x_row + c);
  T* d_x = at<T>(p.d_x, r * p.M * (p.gated ? 2 : 1) + c);
  Pack<N> gate = get<N>(x), d = get<N>(at<T>(p.d_y, r * p.d_y_row + c)), up{};
  if (p.gated) up = get<N>(x + p.M);
  for (int j = 0; j < N; ++j) {
    const float g = gate.x[j], s = share(g, p.gelu);
    const float dz = p.gelu ? (g * g * (3 * kCube) + 1) * kGelu : 1;
    gate.x[j] = d.x[j] * (s + g * s * (1 - s) * dz) * (p.gated ? up.x[j] : 1);
    up.x[j] = d.x[j] * g * s;
  }
  put<N>(d_x, gate);
  if (p.gated) put<N>(d_x + p.M, up);
}

// The maximum and the sum of e^(x - maximum), in one pass (online softmax).
template <class T, int N>
__global__ void loss_rows(const Loss p) {
  const int64_t r = blockIdx.x, first = threadIdx.x * N, step = blockDim.x * N;
  T* x = at<T>(p.logits, r * p.row);
  const int64_t target = p.targets[r];
  if (target < 0) {
    if (threadIdx.x == 0) p.loss[r] = 0;
    if (p.gradient)
      for (int64_t c = first; c < p.V; c += step) put<N>(x + c, Pack<N>{});
    return;
  }
  float most = -INFINITY, sum = 0;
  for (int64_t c = first; c < p.V; c += step) {
    const Pack<N> a = get<N>(x + c);
    float here = a.x[0];
    for (int i = 1; i < N; ++i) here = fmaxf(here, a.x[i]);
    if (here > most) sum *= expf(most - here), most = here;
    for (int i = 0; i < N; ++i)  // while all are -inf, skip exp(-inf + inf) but keep a NaN
      sum += most > -INFINITY ? expf(a.x[i] - most) : isnan(a.x[i]) ? a.x[i] : 0;
  }
  const float top = block_fold(most, -INFINITY, [](float a, float b) { return fmaxf(a, b); });
  sum = block_sum(most == -INFINITY ? sum * 0 : sum * expf(most - top));
  const float log_sum = top + logf(sum);
  const float wanted = target < p.V ? wide(x[target]) : NAN;
  __syncthreads();  // all threads read x[target] before it is overwritten
  if (threadIdx.x == 0) p.loss[r] = log_sum - wanted;
  if (!p.gradient) return;
  const float scale = *p.scale;
  for (int64_t c = first; c < p.V; c += step) {
    Pack<N> a = get<N>(x + c);
    for (int i = 0; i < N; ++i)
      a.x[i] = (c + i == target ? expm1f(a.x[i] - log_sum) : expf(a.x[i] - log_sum)) * scale;
    put<N>(x + c, a);
  }
}

template <class F>
static void with_gated(const Gated& p, const F& f) {
  const bool four = fours({p.M, p.x_row, p.d_y_row}, {p.x, p.y, p.d_y, p.d_x});
  with(p.dtype, [&](auto T) {
    with_width(four, [&](auto N) {
      const int64_t items = p.rows.count * p.M / N.value;
      f(T, N, unsigned((items + 255) / 256));
    });
  });
}
void gated(const Gated& p, Stream stream) {
  with_gated(p, [&](auto T, auto N, unsigned blocks) {
    gated_rows<decltype(T), N.value><<<blocks, 256, 0, stream>>>(p);
  });
}
void gated_backward(const Gated& p, Stream stream) {
  with_gated(p, [&](auto T, auto N, unsigned blocks) {
    gated_rows_backward<decltype(T), N.value><<<blocks, 256, 0, stream>>>(p);
  });
}
void loss(const Loss& p, Stream stream) {
  const bool four = fours({p.V, p.row}, {p.logits});
  with(p.dtype, [&](auto T) {
    with_width(four, [&](auto N) {
      loss_rows<decltype(T), N.value>
          <<<unsigned(p.rows.count), threads_for(p.V, N.value, 1024), 0, stream>>>(p);
    });
  });
}

const char* last_error() {
  const cudaError_t e = cudaGetLastError();
  return e == cudaSuccess ? nullptr : cudaGetErrorString(e);
}

}  // namespace horner::nn::kernels::cuda

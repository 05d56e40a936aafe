// The first step of backward: from the gradient of the result to that of the sums, one warp for a
// row.
#pragma once

#include "attn/exec/kernels/fused_cuda_epilogue.cuh"

namespace horner::attn::kernels::cuda {

inline constexpr int kRowWarps = 8;

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
template <class T>
__device__ inline float2 load_pair(const T* x) {
  if constexpr (std::is_same_v<T, float>) return *reinterpret_cast<const float2*>(x);
  if constexpr (std::is_same_v<T, bf16>)
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(x));
  if constexpr (std::is_same_v<T, fp16>)
    return __half22float2(*reinterpret_cast<const __half2*>(x));
}

template <class T, int C>
__global__ __launch_bounds__(32 * kRowWarps) void rows_kernel(const __grid_constant__ Fused f,
                                                              bool is_exp) {
  constexpr int n = C / 32;
  const auto channel = [](int i) { return i / 2 * 64 + lane() * 2 + i % 2; };
  const Epilogue& p = f.epilogue;
  const int64_t rows = int64_t(f.B) * f.H * f.T;
  const T* const us = static_cast<const T*>(f.u ? f.u : f.o);
  Lanes<n> d_weight{}, d_bias{};
  for (int k = warp(); k < kRowsOfBlock; k += kRowWarps) {
    const int64_t row = int64_t(blockIdx.x) * kRowsOfBlock + k;
    if (row >= rows) break;
    const int t = int(row % f.T), head = int(row / f.T);
    const T* const given = row_of<T>(f.d_o, head / f.H, head % f.H, t);
    const float W = f.W[row], shift = f.shift[row], r = f.r[row];
    const float post = p.post_gate ? p.post_gate[row] : 1;
    Lanes<n> u{}, du{};
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      if (channel(i) >= f.E) continue;
      const float2 a = load_pair(us + row * f.E + channel(i)), b = load_pair(given + channel(i));
      u[i] = a.x, u[i + 1] = a.y, du[i] = b.x, du[i + 1] = b.y;
    }
    float d_post = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (channel(i) >= f.channels || r == 0) du[i] = 0;
      d_post += du[i] * scaled(p, f.channels, channel(i), u[i]);
      du[i] *= post;
      d_weight[i] += du[i] * u[i], d_bias[i] += du[i];
      if (p.norm_weight && channel(i) < f.channels) du[i] *= p.norm_weight[channel(i)];
    }
    d_post = warp_sum(d_post);
    if (p.d_post_gate && lane() == 0) p.d_post_gate[row] = d_post;
    const RowGradient d =
        row_gradient(p, f.channels, row, u, du, W, shift, r, [](float x) { return warp_sum(x); });
    if (f.g)
#pragma unroll
      for (int i = 0; i < n; i += 2)
        if (channel(i) < f.E) store_pair<T>(f.g, row * f.E + channel(i), du[i], du[i + 1]);
    if (lane() != 0) continue;
    // Without g the gradient of the result stands for it, without the gate after the norm.
    const float by = is_exp ? shift : 0, unit = is_exp ? 1 : expf(-shift);
    const float sub = (f.centre ? f.centre[row] : 0) + by;
    const float per = is_exp ? kLog2e : 1;
    f.queries[row] = {sub * per, (f.clamp - by) * per, d.a * unit * (f.g ? 1 : post), d.dW * unit};
    if (f.d_decay_query) f.d_decay_query[row] = d.pull;
  }
  if (!p.d_norm_weight) return;
  __shared__ float sums[2][kRowWarps][C];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    sums[0][warp()][channel(i)] = d_weight[i];
    sums[1][warp()][channel(i)] = d_bias[i];
  }
  __syncthreads();
  for (int c = int(threadIdx.x); c < f.E; c += 32 * kRowWarps) {
    float sum[2] = {};
    for (int k = 0; k < kRowWarps; ++k) sum[0] += sums[0][k][c], sum[1] += sums[1][k][c];
    p.d_norm_weight[int64_t(blockIdx.x) * f.E + c] = sum[0];
    if (p.d_norm_bias) p.d_norm_bias[int64_t(blockIdx.x) * f.E + c] = sum[1];
  }
}

}  // namespace horner::attn::kernels::cuda

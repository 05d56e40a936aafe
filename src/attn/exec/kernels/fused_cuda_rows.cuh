// The first step of backward: from the gradient of the result to that of the sums, row by row.
#pragma once

#include "attn/exec/kernels/fused_cuda_epilogue.cuh"

namespace horner::attn::kernels::cuda {

inline constexpr int kRowWarps = 8;

// Eight channels for each lane, so that a row lies over C / 8 lanes.
template <class T>
__device__ inline Lanes<8> load_8(const T* x) {
  if constexpr (std::is_same_v<T, float>) {
    const float4 a = *reinterpret_cast<const float4*>(x),
                 b = *reinterpret_cast<const float4*>(x + 4);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(x);
    const T* numbers = reinterpret_cast<const T*>(&words);
    return lanes<8>([&](int i) { return float(numbers[i]); });
  }
}
template <int lanes_of_row>
__device__ inline float row_sum(float x) {
#pragma unroll
  for (int step = 1; step < lanes_of_row; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// With a learned norm, whose gradients are gathered; without, in fewer registers.
template <class T, int C, bool learned>
__global__ __launch_bounds__(32 * kRowWarps,
                             learned ? 2 : 5) void rows_kernel(const __grid_constant__ Fused f,
                                                               bool is_exp) {
  constexpr int n = 8, kLanes = C / n, kRows = 32 / kLanes;  // rows at once, of a warp
  const int first = lane() % kLanes * n;                     // channel
  const bool leads = lane() % kLanes == 0;
  const Epilogue& p = f.epilogue;
  const int64_t rows = int64_t(f.B) * f.H * f.T;
  const T* const us = static_cast<const T*>(f.u ? f.u : f.o);
  Lanes<n> d_weight{}, d_bias{};
  for (int k = warp() * kRows + lane() / kLanes; k < kRowsOfBlock; k += kRowWarps * kRows) {
    const int64_t at = int64_t(blockIdx.x) * kRowsOfBlock + k, row = at < rows ? at : rows - 1;
    const bool inside = at < rows, real = first < f.E;
    const int head = int(uint32_t(row) / uint32_t(f.T)), t = int(uint32_t(row) % uint32_t(f.T));
    const float W = f.W[row], shift = f.shift[row], r = f.r[row];
    const float post = p.post_gate ? p.post_gate[row] : 1;
    Lanes<n> u{}, du{};
    if (real) {
      u = load_8(us + row * f.E + first);
      du = load_8(row_of<T>(f.d_o, head / f.H, head % f.H, t) + first);
    }
    float d_post = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (first + i >= f.channels || r == 0 || !inside) du[i] = 0;
      d_post += du[i] * scaled(p, f.channels, first + i, u[i]);
      du[i] *= post;
      if constexpr (learned) {
        d_weight[i] += du[i] * u[i], d_bias[i] += du[i];
        if (first + i < f.channels) du[i] *= p.norm_weight[first + i];
      }
    }
    if (p.d_post_gate) {
      d_post = row_sum<kLanes>(d_post);
      if (leads && inside) p.d_post_gate[row] = d_post;
    }
    const RowGradient d = row_gradient(p, f.channels, row, leads && inside, u, du, W, shift, r,
                                       [](float x) { return row_sum<kLanes>(x); });
    if (!inside) continue;
    if (f.g && real)
#pragma unroll
      for (int i = 0; i < n; i += 2) store_pair<T>(f.g, row * f.E + first + i, du[i], du[i + 1]);
    if (!leads) continue;
    // Without g the gradient of the result stands for it, without the gate after the norm.
    const float by = is_exp ? shift : 0, unit = is_exp ? 1 : expf(-shift);
    const float sub = (f.centre ? f.centre[row] : 0) + by, per = is_exp ? kLog2e : 1;
    f.queries[row] = {sub * per, (f.clamp - by) * per, d.a * unit * (f.g ? 1 : post), d.dW * unit};
    if (f.d_decay_query) f.d_decay_query[row] = d.pull;
  }
  if constexpr (learned) {
    __shared__ float sums[2][kRowWarps * kRows][C];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      sums[0][warp() * kRows + lane() / kLanes][first + i] = d_weight[i];
      sums[1][warp() * kRows + lane() / kLanes][first + i] = d_bias[i];
    }
    __syncthreads();
    for (int c = int(threadIdx.x); c < f.E; c += 32 * kRowWarps) {
      float sum[2] = {};
      for (int k = 0; k < kRowWarps * kRows; ++k) sum[0] += sums[0][k][c], sum[1] += sums[1][k][c];
      p.d_norm_weight[int64_t(blockIdx.x) * f.E + c] = sum[0];
      if (p.d_norm_bias) p.d_norm_bias[int64_t(blockIdx.x) * f.E + c] = sum[1];
    }
  }
}

}  // namespace horner::attn::kernels::cuda

// A warp takes one row at a time.
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/delta/norm.h"

namespace horner::attn::kernels::cuda {

namespace {

constexpr int kWarps = 8;

__device__ float warp_sum(float x) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}

// n channels of each lane.
template <int n>
struct Normed {
  float x[n], r;

  __device__ Normed(const NormedRows& p, int64_t row) {
    const bf16* from = static_cast<const bf16*>(p.N) + row * p.stride + n * lane();
    float squares = 0;
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      const float2 two = unpack2(bf16(), *reinterpret_cast<const uint32_t*>(from + i));
      x[i] = two.x, x[i + 1] = two.y;
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (n * lane() + i >= p.channels) x[i] = 0;
      squares += x[i] * x[i];
    }
    r = rsqrtf(warp_sum(squares) / float(p.channels) + p.eps);
  }
};
template <int n>
__device__ void load_weight(const NormedRows& p, float (&weight)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i)
    weight[i] = n * lane() + i < p.channels ? p.weight[n * lane() + i] : 0;
}

template <int n>
__global__ void forward_kernel(NormedRows p) {
  float weight[n];
  load_weight(p, weight);
  const int64_t step = int64_t(gridDim.x) * kWarps;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + warp(); row < p.rows; row += step) {
    const Normed<n> y(p, row);
    bf16* to = static_cast<bf16*>(p.o) + row * p.channels;
    if (p.channels == 32 * n) {
#pragma unroll
      for (int i = 0; i < n; i += 2)
        *reinterpret_cast<uint32_t*>(to + n * lane() + i) =
            pack2(bf16(), y.x[i] * y.r * weight[i], y.x[i + 1] * y.r * weight[i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (n * lane() + i < p.channels) to[n * lane() + i] = bf16(y.x[i] * y.r * weight[i]);
    }
  }
}

// dN has no part along the row. What rounding adds there does not average out in dq: one channel
// takes it, one that is no small part of the row, and of these the one with the finest steps.
template <int n>
__device__ void remove_along_row(const Normed<n>& y, int channels, float (&dN)[n]) {
  constexpr float kShare = 0.25f;  // of the mean square
  float along = 0, squares = 0, step = INFINITY;
  int at = -1;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float rounded = float(bf16(dN[i]));
    along += (rounded - dN[i]) * y.x[i], squares += y.x[i] * y.x[i];
    dN[i] = rounded;
  }
  along = warp_sum(along), squares = warp_sum(squares);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float share = y.x[i] * y.x[i] * float(channels), size = fabsf(dN[i] * y.x[i]);
    if (share > 0 && share >= kShare * squares && size < step) step = size, at = i;
  }
  float least = step;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) least = fminf(least, __shfl_xor_sync(~0u, least, i));
  const uint32_t lanes = __ballot_sync(~0u, at >= 0 && step == least);
  if (__ffs(lanes) - 1 != lane()) return;
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (i == at) dN[i] -= along / y.x[i];
}

template <int n>
__global__ void backward_kernel(NormedRows p) {
  __shared__ float parts[kWarps][32 * n];
  float weight[n], d_weight[n] = {};
  load_weight(p, weight);
  const int64_t step = int64_t(gridDim.x) * kWarps;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + warp(); row < p.rows; row += step) {
    const Normed<n> y(p, row);
    const bf16* from = static_cast<const bf16*>(p.d_o) + row * p.channels + n * lane();
    float g[n], dot = 0;
    if (p.channels == 32 * n) {
#pragma unroll
      for (int i = 0; i < n; i += 2) {
        const float2 two = unpack2(bf16(), *reinterpret_cast<const uint32_t*>(from + i));
        g[i] = two.x, g[i + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) g[i] = n * lane() + i < p.channels ? float(from[i]) : 0;
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      d_weight[i] += g[i] * y.x[i] * y.r;
      g[i] *= weight[i], dot += g[i] * y.x[i];
    }
    const float along = warp_sum(dot) * y.r * y.r / float(p.channels);
    bf16* to = static_cast<bf16*>(p.dN) + row * p.stride + n * lane();
#pragma unroll
    for (int i = 0; i < n; ++i) g[i] = y.r * (g[i] - along * y.x[i]);
    remove_along_row(y, p.channels, g);
#pragma unroll
    for (int i = 0; i < n; i += 2)
      *reinterpret_cast<uint32_t*>(to + i) = pack2(bf16(), g[i], g[i + 1]);
  }
#pragma unroll
  for (int i = 0; i < n; ++i) parts[warp()][n * lane() + i] = d_weight[i];
  __syncthreads();
  for (int c = int(threadIdx.x); c < 32 * n; c += 32 * kWarps) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += parts[w][c];
    p.d_weight[int64_t(blockIdx.x) * p.stride + c] = sum;
  }
}

Grid grid(const NormedRows& p) {
  return {norm_blocks(p), 1, 32 * kWarps, 0};
}

}  // namespace

int norm_blocks(const NormedRows& p) {
  const int64_t all = ceil_div(p.rows, kWarps);
  return int(all < 1024 ? all : 1024);
}

void norm_forward(const NormedRows& p, Stream stream) {
  launch(p.stride == 64 ? forward_kernel<2> : forward_kernel<4>, grid(p), stream, p);
}
void norm_backward(const NormedRows& p, Stream stream) {
  launch(p.stride == 64 ? backward_kernel<2> : backward_kernel<4>, grid(p), stream, p);
}

}  // namespace horner::attn::kernels::cuda

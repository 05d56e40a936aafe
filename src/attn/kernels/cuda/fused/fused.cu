// Launches of the fused kernels, dispatched by dtype.
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/fused/fused.h"
#include "attn/kernels/cuda/fused/stick.h"

namespace horner::attn::kernels::cuda {

static RuntimeWeight runtime(const Weights& weights) {
  const RuntimeWeight* w = std::get_if<RuntimeWeight>(&weights);
  return w ? *w : RuntimeWeight{};
}

int fused_shared_memory(Dtype dtype, int channels) {
  int bytes = 0;
  with_dtype(dtype, [&]<class T>(T) { bytes = FusedLaunch<T>::shared_memory(channels); });
  return bytes;
}

void find_row_thresholds(const Fused& f, const Weights& w, bool adaptive, Stream stream) {
  with_dtype(f.dtype,
             [&]<class T>(T) { FusedLaunch<T>::thresholds(f, runtime(w), adaptive, stream); });
}
void fused_forward(const Fused& f, const Weights& w, Stream stream) {
  with_dtype(f.dtype, [&]<class T>(T) { FusedLaunch<T>::forward(f, w, stream); });
}
void fused_statistics(const Fused& f, const Weights& w, Stream stream) {
  with_dtype(f.dtype, [&]<class T>(T) { FusedLaunch<T>::statistics(f, w, stream); });
}
// Column sums of x [rows, n]: 8 columns per thread block, four rows at a time per warp.
static __global__ __launch_bounds__(1024) void column_sums_kernel(const float* x, int64_t rows,
                                                                  int n, float* sums) {
  __shared__ float parts[32][8];
  const int column = int(blockIdx.x) * 8 + lane() % 8;
  float sum[4] = {};
  if (column < n)
    for (int64_t k = warp() * 4 + lane() / 8; k < rows; k += 4 * 128)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (k + 128 * i < rows) sum[i] += x[(k + 128 * i) * n + column];
  float all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  all += __shfl_xor_sync(~0u, all, 8);
  all += __shfl_xor_sync(~0u, all, 16);
  if (lane() < 8) parts[warp()][lane()] = all;
  __syncthreads();
  if (threadIdx.x >= 8 || column >= n) return;
  all = 0;
  for (int k = 0; k < 32; ++k) all += parts[k][lane()];
  sums[column] = all;
}

void row_gradients(const Fused& f, const Weights& w, Stream stream) {
  const bool is_exp = std::holds_alternative<Exp>(w);
  with_dtype(f.dtype, [&]<class T>(T) { FusedLaunch<T>::row_gradients(f, is_exp, stream); });
  const Epilogue& p = f.epilogue;
  if (p.d_norm)
    launch(column_sums_kernel, {ceil_div(2 * f.E, 8), 1, 1024, 0}, stream, p.d_norm_parts,
           row_blocks(f), 2 * f.E, p.d_norm);
}
void row_gradient_sums(const Fused& f, const Weights& w, Stream stream) {
  with_dtype(f.dtype,
             [&]<class T>(T) { FusedLaunch<T>::row_gradient_sums(with_g(f), runtime(w), stream); });
}
void fused_backward(const Fused& f, const Weights& w, Stream stream) {
  with_dtype(f.dtype, [&]<class T>(T) { FusedLaunch<T>::backward(with_g(f), w, stream); });
}
void fused_dq(const Fused& f, const Weights& w, Stream stream) {
  with_dtype(f.dtype, [&]<class T>(T) { FusedLaunch<T>::dq(with_g(f), w, stream); });
}
void stick_forward(const Sticks& p, Stream stream) {
  const bool narrow = p.f.dtype == Dtype::bfloat16;
  (narrow ? StickLaunch<bf16>::forward : StickLaunch<float>::forward)(p, stream);
}
void stick_backward(const Sticks& p, Stream stream) {
  const bool narrow = p.f.dtype == Dtype::bfloat16;
  (narrow ? StickLaunch<bf16>::backward : StickLaunch<float>::backward)(p, stream);
}
void unpack_dq(const Fused& f, Stream stream) {
  with_dtype(f.dtype, [&]<class T>(T) { FusedLaunch<T>::unpack_dq(f, stream); });
}

}  // namespace horner::attn::kernels::cuda

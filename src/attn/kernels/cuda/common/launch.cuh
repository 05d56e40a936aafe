// Kernel selection (dtype, channels, degree) and launch.
#pragma once

#include <string>
#include <type_traits>

#include "attn/kernels/cuda/common/mma.cuh"
#include "attn/kernels/cuda/common/problem.h"
#include "attn/kernels/cuda/common/weights.cuh"
#include "core/check.h"

namespace horner::attn::kernels::cuda {

// Calls f(T()) with the dtype's type.
template <class F>
void with_dtype(Dtype dtype, const F& f) {
  if (dtype == Dtype::bfloat16) return f(bf16());
  if (dtype == Dtype::float16) return f(fp16());
  f(float());
}

// Calls f with 64, 128 or 256 as a constant.
template <class F>
void with_channels(const Fused& p, const F& f) {
  const int most = p.D > p.E ? p.D : p.E;
  if (most <= 64) return f(std::integral_constant<int, 64>());
  if (most <= 128) return f(std::integral_constant<int, 128>());
  f(std::integral_constant<int, 256>());
}

// For specialized degrees, folds the scale into the coefficients: they apply to unscaled q.k.
template <class W>
const W& fold_scale(const W& w, float, int) {
  return w;
}
inline Polynomial fold_scale(Polynomial p, float scale, int degree) {
  double unit = 1;
  for (int n = 0; is_specialized_degree(degree) && n <= degree; ++n, unit *= scale)
    p.c[n] = float(p.c[n] * unit);
  return p;
}

struct Grid {
  int64_t x, y;
  int threads, bytes;
};
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, Stream stream,
            const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0) return;
  check(grid.y < 65536, "grid.y is at most 65535; use a shorter sequence; got ", grid.y);
  constexpr int kDefaultSharedMemory = 48 << 10;  // bytes available without opt-in
  cudaError_t error = cudaSuccess;
  if (grid.bytes > kDefaultSharedMemory)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.bytes);
  if (error == cudaSuccess) {
    const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
    kernel<<<blocks, static_cast<unsigned>(grid.threads), static_cast<size_t>(grid.bytes),
             stream>>>(arguments...);
    error = cudaGetLastError();
  }
  check(error == cudaSuccess, "kernel launch failed: ", cudaGetErrorString(error));
}

// After `row_gradients`, g replaces the gradient of the result.
inline Fused with_g(Fused f) {
  const int64_t row = f.E, head = row * f.T, batch = head * f.H;
  if (f.g) f.d_o = {f.g, batch, head, row};
  return f;
}

inline int64_t ceil_div(int64_t n, int64_t size) {
  return (n + size - 1) / size;
}
inline int64_t heads(const Fused& f) {
  return int64_t(f.B) * f.H;
}

}  // namespace horner::attn::kernels::cuda

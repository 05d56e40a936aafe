// How a kernel is chosen and started. Each source that includes this is compiled once per dtype
// (HORNER_DTYPE).
#pragma once

#include <string>
#include <type_traits>

#include "attn/kernels/cuda/common/mma.cuh"
#include "attn/kernels/cuda/common/problem.h"
#include "attn/kernels/cuda/common/weights.cuh"
#include "core/check.h"

namespace horner::attn::kernels::cuda {

// What fused_cuda.cu calls, by the dtype.
template <class T>
struct Launch {
  static int shared_memory(int channels);
  static void find(const Fused&, const Other&, bool adaptive, Stream);
  static void forward(const Fused&, const Weights&, Stream);
  static void statistics(const Fused&, const Weights&, Stream);
  static void rows(const Fused&, bool is_exp, Stream);
  static void pulls(const Fused&, const Other&, Stream);
  static void keys(const Fused&, const Weights&, Stream);
  static void queries(const Fused&, const Weights&, Stream);
  static void dq_of_sums(const Fused&, Stream);
};

// Likewise of hopper_cuda.h.
template <class T>
struct HopperLaunch {
  static void forward(const Fused&, const Weights&, const float* factors, Stream);
  static void keys(const Fused&, const Weights&, Stream);
};

// f(64), f(128) or f(256), as constants.
template <class F>
void with_channels(const Fused& p, const F& f) {
  const int most = p.D > p.E ? p.D : p.E;
  if (most <= 64) return f(std::integral_constant<int, 64>());
  if (most <= 128) return f(std::integral_constant<int, 128>());
  f(std::integral_constant<int, 256>());
}

// Where the kernel knows the degree, coefficients for products before the scale.
template <class W>
const W& before_scale(const W& w, float, int) {
  return w;
}
inline Polynomial before_scale(Polynomial p, float scale, int degree) {
  double unit = 1;
  for (int n = 0; knows_degree(degree) && n <= degree; ++n, unit *= scale)
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
  check(grid.y < 65536, "more blocks of tokens than a GPU takes: ", grid.y);
  constexpr int kAlways = 48 << 10;  // bytes that need not be asked for
  cudaError_t error = cudaSuccess;
  if (grid.bytes > kAlways)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.bytes);
  if (error == cudaSuccess) {
    const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
    kernel<<<blocks, static_cast<unsigned>(grid.threads), static_cast<size_t>(grid.bytes),
             stream>>>(arguments...);
    error = cudaGetLastError();
  }
  check(error == cudaSuccess, "the GPU cannot run this kernel: ", cudaGetErrorString(error));
}

// After `rows`, g is what stands for the gradient of the result.
inline Fused with_g(Fused f) {
  const int64_t row = f.E, head = row * f.T, batch = head * f.H;
  if (f.g) f.d_o = {f.g, batch, head, row};
  return f;
}

inline int64_t blocks(int64_t n, int64_t size) {
  return (n + size - 1) / size;
}
inline int64_t heads(const Fused& f) {
  return int64_t(f.B) * f.H;
}

}  // namespace horner::attn::kernels::cuda

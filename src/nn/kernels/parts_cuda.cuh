// Common to the CUDA kernels of parts.h: dtypes, vector access, reductions, launch sizes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <initializer_list>
#include <type_traits>

#include "nn/kernels/parts.h"

namespace horner::nn::kernels::cuda {

__device__ inline float wide(float x) {
  return x;
}
__device__ inline float wide(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float wide(__half x) {
  return __half2float(x);
}
template <class T>
__device__ inline T narrow(float x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}

// N consecutive elements, read or written in one access.
template <int N>
struct Pack {
  float x[N];
};
template <int N, class T>
struct alignas(N * sizeof(T)) Raw {
  T x[N];
};
template <int N, class T>
__device__ inline Pack<N> get(const T* p) {
  const Raw<N, T> raw = *reinterpret_cast<const Raw<N, T>*>(p);
  Pack<N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.x[i] = wide(raw.x[i]);
  return out;
}
template <int N, class T>
__device__ inline void put(T* p, const Pack<N>& x) {
  Raw<N, T> raw;
#pragma unroll
  for (int i = 0; i < N; ++i) raw.x[i] = narrow<T>(x.x[i]);
  *reinterpret_cast<Raw<N, T>*>(p) = raw;
}

template <class T>
__device__ inline const T* at(const void* p, int64_t i) {
  return static_cast<const T*>(p) + i;
}
template <class T>
__device__ inline T* at(void* p, int64_t i) {
  return static_cast<T*>(p) + i;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}
// Reduction over a thread block of up to 32 full warps; every thread gets the result.
template <class F>
__device__ inline float block_fold(float x, float start, const F& f) {
  __shared__ float parts[32];
  for (int i = 16; i > 0; i /= 2) x = f(x, __shfl_xor_sync(~0u, x, i));
  __syncthreads();  // all threads have read `parts` of the last call
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : start;
  for (int i = 16; i > 0; i /= 2) x = f(x, __shfl_xor_sync(~0u, x, i));
  return x;
}
__device__ inline float block_sum(float x) {
  return block_fold(x, 0, [](float a, float b) { return a + b; });
}

template <class F>
inline void with(Dtype d, const F& f) {
  if (d == Dtype::float32) return f(float());
  if (d == Dtype::bfloat16) return f(__nv_bfloat16());
  f(__half());
}
// Whether vectors of 4 apply: sizes and strides divisible by 4, pointers aligned to 16 bytes.
inline bool fours(std::initializer_list<int64_t> sizes, std::initializer_list<const void*> places) {
  for (const int64_t n : sizes)
    if (n % 4) return false;
  for (const void* p : places)
    if (reinterpret_cast<uintptr_t>(p) % 16) return false;
  return true;
}
template <class F>
inline void with_width(bool four, const F& f) {
  four ? f(std::integral_constant<int, 4>()) : f(std::integral_constant<int, 1>());
}
// Full warps, about four iterations over n elements.
inline unsigned threads_for(int64_t n, int width, unsigned most) {
  const int64_t t = (n / width + 127) / 128 * 32;
  return unsigned(t < 32 ? 32 : t > most ? most : t);
}

}  // namespace horner::nn::kernels::cuda

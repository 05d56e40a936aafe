// CUDA kernels on a CPU: every thread of a block is a fiber, blocks run one after another. Warps
// meet at shuffles, votes and matrix instructions, blocks at barriers; a warp whose lanes meet at
// different ones ends the program. Copies by cp.async happen at the wait for them, no earlier, and
// shared memory begins as NaN, so that what is read too early is seen.
//
// Included before everything else by the sources that transform.py makes of kernels. An
// instruction of PTX is a function with its name.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#define HORNER_EMULATOR
#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __forceinline__
#define __forceinline__ inline

namespace emulator {

struct Place {
  uint3 thread, block;
  dim3 threads, blocks;
};
Place& place();  // of the fiber that runs

int64_t launches();  // so far

// Runs kernel() once for every thread of every block.
void run(dim3 blocks, unsigned threads, size_t bytes, const std::function<void()>& kernel);

template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 blocks, unsigned threads, size_t bytes,
            cudaStream_t, std::type_identity_t<Parameters>... arguments) {
  run(blocks, threads, bytes, [&] { kernel(arguments...); });
}

unsigned char* dynamic_memory();  // a multiple of 1024, and of everything that tiles ask for
uint32_t shared_address(const void*);
void* shared_pointer(uint32_t);

// All lanes of the warp arrive, each with its own operands; the last one calls `work` with all of
// them. `name` has to be the same for all.
void meet_in_warp(const char* name, void* own, const std::function<void(void* const* lanes)>& work);
void meet_in_block();
int meet_in_block_or(int);

void copy_later(uint32_t to, const void* from, int bytes, int zeros);
void commit_copies();
void finish_copies(int but);  // but < 0: all, also those that are not committed

// x[lane] of all lanes.
template <class T>
struct Exchange {
  T x;
  int from;
};
template <class T>
T shuffle(const char* name, T x, int from) {
  Exchange<T> own{x, from};
  meet_in_warp(name, &own, [](void* const* lanes) {
    T all[32];
    for (int i = 0; i < 32; ++i) all[i] = lanes[i] ? static_cast<Exchange<T>*>(lanes[i])->x : T();
    for (int i = 0; i < 32; ++i)
      if (auto* lane = static_cast<Exchange<T>*>(lanes[i])) lane->x = all[lane->from];
  });
  return own.x;
}
template <class T, class F>
T reduced(const char* name, T x, const F& f) {
  Exchange<T> own{x, 0};
  meet_in_warp(name, &own, [&](void* const* lanes) {
    T all{};
    bool any = false;
    for (int i = 0; i < 32; ++i)
      if (auto* lane = static_cast<Exchange<T>*>(lanes[i]))
        all = any ? f(all, lane->x) : lane->x, any = true;
    for (int i = 0; i < 32; ++i)
      if (auto* lane = static_cast<Exchange<T>*>(lanes[i])) lane->x = all;
  });
  return own.x;
}
inline int lane() {
  return int(place().thread.x & 31);
}
void require_full(unsigned mask);

}  // namespace emulator

#define threadIdx (emulator::place().thread)
#define blockIdx (emulator::place().block)
#define blockDim (emulator::place().threads)
#define gridDim (emulator::place().blocks)

inline void __syncthreads() {
  emulator::meet_in_block();
}
inline int __syncthreads_or(int x) {
  return emulator::meet_in_block_or(x);
}
inline void __syncwarp(unsigned mask = ~0u) {
  emulator::require_full(mask);
  emulator::meet_in_warp("__syncwarp", nullptr, [](void* const*) {});
}
template <class T>
T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
  emulator::require_full(mask);
  const int l = emulator::lane();
  return emulator::shuffle("__shfl_sync", x, l / width * width + from % width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int by, int width = 32) {
  emulator::require_full(mask);
  const int l = emulator::lane(), to = l ^ by;
  return emulator::shuffle("__shfl_xor_sync", x, to / width > l / width ? l : to);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int by, int width = 32) {
  emulator::require_full(mask);
  const int l = emulator::lane();
  return emulator::shuffle("__shfl_up_sync", x, l % width >= by ? l - by : l);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, int by, int width = 32) {
  emulator::require_full(mask);
  const int l = emulator::lane();
  return emulator::shuffle("__shfl_down_sync", x, l % width + by < width ? l + by : l);
}
inline unsigned __ballot_sync(unsigned mask, int x) {
  emulator::require_full(mask);
  return emulator::reduced<unsigned>("__ballot_sync", x ? 1u << emulator::lane() : 0u,
                                     [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int x) {
  return __ballot_sync(mask, x) != 0;
}
inline int __all_sync(unsigned mask, int x) {
  return __ballot_sync(mask, !x) == 0;
}
template <class T>
T __reduce_min_sync(unsigned mask, T x) {
  emulator::require_full(mask);
  return emulator::reduced("__reduce_min_sync", x, [](T a, T b) { return a < b ? a : b; });
}
template <class T>
T __reduce_max_sync(unsigned mask, T x) {
  emulator::require_full(mask);
  return emulator::reduced("__reduce_max_sync", x, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
T atomicAdd(T* at, T x) {
  const T before = *at;
  *at = before + x;
  return before;
}
inline float4 atomicAdd(float4* at, float4 x) {
  const float4 before = *at;
  at->x += x.x, at->y += x.y, at->z += x.z, at->w += x.w;
  return before;
}
inline float2 atomicAdd(float2* at, float2 x) {
  const float2 before = *at;
  at->x += x.x, at->y += x.y;
  return before;
}

inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline int __float_as_int(float x) {
  return int(__float_as_uint(x));
}
inline float __int_as_float(int x) {
  return __uint_as_float(uint32_t(x));
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1 / x;
}
inline float __fmul_rn(float a, float b) {
  volatile float y = a * b;
  return y;
}
inline float rsqrtf(float x) {
  return 1 / std::sqrt(x);
}
inline double rsqrt(double x) {
  return 1 / std::sqrt(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __clz(int x) {
  return x ? __builtin_clz(unsigned(x)) : 32;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t y = 0;
  for (int i = 0; i < 4; ++i) y |= uint32_t(both >> (s >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return y;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned(uint64_t(a) * b >> 32);
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
T __ldg(const T* at) {
  return *at;
}
inline size_t __cvta_generic_to_shared(const void* at) {
  return emulator::shared_address(at);
}
inline void* __cvta_shared_to_generic(size_t at) {
  return emulator::shared_pointer(uint32_t(at));
}
template <class A, class B>
auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return T(std::fmin(T(a), T(b)));
  else
    return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return T(std::fmax(T(a), T(b)));
  else
    return T(a) > T(b) ? T(a) : T(b);
}

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}

#include "ptx.h"

// Where a block of threads works, and how rows of q, k and v come to shared memory.
#pragma once

#include "attn/exec/kernels/fused_cuda_mma.cuh"
#include "attn/exec/kernels/fused_cuda_weights.cuh"

namespace horner::attn::kernels::cuda {

// Head h of batch b, and its key head.
struct Head {
  int b, h, g;

  __device__ Head(int b, int h, int g) : b(b), h(h), g(g) {}
  __device__ Head(const Fused& f, int index) : b(index / f.H), h(index % f.H), g(h / (f.H / f.G)) {}
  __device__ int64_t row(const Fused& f, int t) const { return int64_t(b * f.H + h) * f.T + t; }
  __device__ int64_t key(const Fused& f, int s) const { return int64_t(b * f.G + g) * f.S + s; }
};

template <class T>
__device__ const T* row_of(const View& x, int b, int h, int row) {
  return static_cast<const T*>(x.at) + b * x.batch + h * x.head + row * x.row;
}

// Copies that run beside the arithmetic.
__device__ inline void copy_16_bytes(uint32_t to, const void* from, bool real) {
  const int bytes = real ? 16 : 0;  // the rest becomes zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;\n" ::: "memory");
}

// Rows from `from` on; zeros beyond `real` rows and `channels` channels.
template <int rows, int threads, class T, int C>
__device__ inline void copy_rows(Tile<T, C> to, const T* from, int64_t stride, int real,
                                 int channels) {
  constexpr int kChunks = Tile<T, C>::kChunks, kStep = threads / kChunks;
  static_assert(threads % kChunks == 0);
  const int first = int(threadIdx.x) / kChunks, chunk = int(threadIdx.x) % kChunks;
  const bool wanted = chunk * Tile<T, C>::kChunk < channels;
  const T* at = from + first * stride + chunk * Tile<T, C>::kChunk;
#pragma unroll
  for (int i = 0; i < rows; i += kStep, at += kStep * stride) {
    if (rows % kStep != 0 && first + i >= rows) return;
    const bool inside = wanted && first + i < real;
    copy_16_bytes(to.chunk(first + i, chunk), inside ? at : from, inside);
  }
}

__device__ inline uint32_t shared_address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// Over the four lanes that share a row of a fragment.
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Whether some query of [t0, t1) does not see some key of [s0, s1).
__device__ inline bool is_partial(const Seen& seen, int t0, int t1, int s0, int s1) {
  return seen.keep || seen.lo(min(t1, seen.T) - 1) > s0 || seen.hi(t0) < s1;
}

// Whether no query of [t0, t1) sees any key of [s0, s1).
__device__ inline bool is_hidden(const Seen& seen, int t0, int t1, int s0, int s1) {
  return seen.lo(t0) >= s1 || seen.hi(min(t1, seen.T) - 1) <= s0;
}

__device__ inline Care care_for(const Fused& f, int t0, int t1, int s0, int s1) {
  if (f.decay || is_partial(f.seen, t0, t1, s0, s1)) return Care::any;
  return f.clamp < INFINITY ? Care::clamp : Care::none;
}

// A bit for each of the n keys first, first + 1, first + 8, first + 9, ... that query t sees.
template <int n>
__device__ inline uint32_t seen_keys(const Seen& seen, int b, int t, int first) {
  const int at = min(t, seen.T - 1), lo = seen.lo(at), hi = seen.hi(at);
  const auto key = [&](int i) { return first + i / 2 * 8 + i % 2; };
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) bits |= uint32_t(key(i) >= lo && key(i) < hi) << i;
  if (!seen.keep) return bits;
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (!seen.keep[int64_t(b) * seen.S + min(key(i), seen.S - 1)]) bits &= ~(1u << i);
  return bits;
}

// The product of the gates in (s, t], from their running sums: of those a difference is taken in
// double.
__device__ inline double gates_at_key(const Fused& f, const Head& head, int s) {
  return f.decay[head.key(f, min(max(s, 0), f.S - 1))];
}
__device__ inline double gates_at_query(const Fused& f, const Head& head, int t) {
  return gates_at_key(f, head, t + f.S - f.T);
}
__device__ inline float fade(double query, double key) {
  const double x = fmin(query - key, 0.0);
  const float high = float(x);
  return expf(high) * (1 + float(x - double(high)));
}

__device__ inline float gate_of_key(const Fused& f, const Head& head, int s) {
  return f.gate[head.key(f, min(s, f.S - 1))];
}

template <class T>
__device__ inline void store_pair(void* rows, int64_t at, float a, float b) {
  *reinterpret_cast<uint32_t*>(static_cast<T*>(rows) + at) = pair(T(), a, b);
}
template <>
__device__ inline void store_pair<float>(void* rows, int64_t at, float a, float b) {
  *reinterpret_cast<float2*>(static_cast<float*>(rows) + at) = make_float2(a, b);
}

}  // namespace horner::attn::kernels::cuda

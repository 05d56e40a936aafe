// Kernels of counts.h. Gates: one thread block per key head, running sums over keys, then queries.
#include "attn/kernels/cuda/common/epilogue.cuh"
#include "attn/kernels/cuda/common/launch.cuh"
#include "attn/kernels/cuda/prepare/counts.h"

namespace horner::attn::kernels::cuda {

inline constexpr int kScanThreads = 1024, kScanEach = 4;

// put(i, carry + f(0) + ... + f(i)) for i < n, by the whole block, which may read the results
// afterwards.
template <int threads = kScanThreads, class F, class Put>
__device__ inline void running_sums(int n, double carry, const F& f, const Put& put) {
  __shared__ double of_warps[threads / 32];
  for (int start = 0; start < n; start += threads * kScanEach) {
    const int first = start + int(threadIdx.x) * kScanEach;
    double x[kScanEach], own = 0;
#pragma unroll
    for (int i = 0; i < kScanEach; ++i) {
      own += first + i < n ? f(first + i) : 0;
      x[i] = own;
    }
    double sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double before = __shfl_up_sync(~0u, sum, step);
      if (lane() >= step) sum += before;
    }
    if (lane() == 31) of_warps[warp()] = sum;
    __syncthreads();
    double before = __shfl_up_sync(~0u, sum, 1);
    before = (lane() == 0 ? 0 : before) + carry;
    for (int w = 0; w < threads / 32; ++w) {
      if (w < warp()) before += of_warps[w];
      carry += of_warps[w];
    }
#pragma unroll
    for (int i = 0; i < kScanEach; ++i)
      if (first + i < n) put(first + i, before + x[i]);
    __syncthreads();
  }
  __syncthreads();
}

// to[i] = f(0) + ... + f(i - 1), for i up to n.
template <class F>
__device__ inline void sums_before(int n, double* to, const F& f) {
  if (threadIdx.x == 0) to[0] = 0;
  running_sums(n, 0, f, [&](int i, double sum) { to[i + 1] = sum; });
}

// Part of a head's tokens, forward from the first or backward from the last.
template <bool backward>
struct DecayTokens {
  const DecaySums& p;
  int head, index, begin, n;

  __device__ explicit DecayTokens(const DecaySums& p) : p(p), head(int(blockIdx.x)) {
    index = backward ? p.parts() - 1 - int(blockIdx.y) : int(blockIdx.y);
    begin = index * p.part, n = min(p.S - begin, p.part);
  }
  __device__ int64_t at_part(int part) const { return int64_t(head) * p.parts() + part; }
  __device__ int token(int i) const { return begin + (backward ? n - 1 - i : i); }
  __device__ int64_t at(int i) const { return int64_t(head) * p.S + token(i); }
  __device__ double operator[](int i) const {
    if constexpr (!backward) {
      const float log = p.gates[at(i)];
      return p.skips_nan && log != log ? 0 : double(log);
    }
    // A query's own sum is that of the key at its position.
    const int each = p.H / p.G, t = token(i) - (p.S - p.T);
    double d = p.d_key[at(i)];
    for (int h = 0; t >= 0 && h < each; ++h) {
      const int64_t row = (int64_t(head) * each + h) * p.T + t;
      d += p.is_double ? static_cast<const double*>(p.d_query)[row]
                       : double(static_cast<const float*>(p.d_query)[row]);
    }
    return d;
  }
};
template <bool backward>
__global__ __launch_bounds__(kScanThreads) void decay_part_sums_kernel(
    const __grid_constant__ DecaySums p) {
  const DecayTokens<backward> tokens(p);
  running_sums(
      tokens.n, 0, [&](int i) { return tokens[i]; },
      [&](int i, double sum) {
        if (i == tokens.n - 1) p.scratch[tokens.at_part(tokens.index)] = sum;
      });
}
template <bool backward, int threads>
__global__ __launch_bounds__(threads) void decay_prefix_sums_kernel(
    const __grid_constant__ DecaySums p) {
  const DecayTokens<backward> tokens(p);
  double carry = 0;
  if (backward && p.d_after) {
    carry = p.d_after[tokens.at_part(tokens.index)];
  } else {
    for (int part = 0; part < p.parts(); ++part)
      if (backward ? part > tokens.index : part < tokens.index)
        carry += p.scratch[tokens.at_part(part)];
  }
  running_sums<threads>(
      tokens.n, carry, [&](int i) { return tokens[i]; },
      [&](int i, double sum) {
        if constexpr (backward)
          p.d_gates.set(tokens.at(i), float(sum));
        else
          p.sums[tokens.at(i)] = sum;
      });
}
template <bool backward>
static void start_decay(const DecaySums& p, Stream stream) {
  constexpr int kShort = 128;  // threads of a short part
  const Grid grid{int64_t(p.B) * p.G, p.parts(), kScanThreads, 0};
  if (p.parts() > 1 && !p.d_after) launch(decay_part_sums_kernel<backward>, grid, stream, p);
  if (p.part <= kShort * kScanEach)
    launch(decay_prefix_sums_kernel<backward, kShort>, {grid.x, grid.y, kShort, 0}, stream, p);
  else
    launch(decay_prefix_sums_kernel<backward, kScanThreads>, grid, stream, p);
}

// A key head, its gates and how many of those up to each token are NaN.
struct GatedHead {
  const SpoiledRows& p;
  int64_t head;  // b G + g
  int* counts;

  __device__ explicit GatedHead(const SpoiledRows& p)
      : p(p), head(blockIdx.x), counts(p.counts + head * p.seen.S) {}
  __device__ bool is_nan(int s) const {
    const float log = p.gates[head * p.seen.S + s];
    return log != log;
  }
  // The first key of an interval that is not hidden; S if there is none.
  __device__ int first_kept(int s, int end) const {
    if (p.seen.keep)
      while (s < end && !p.seen.keep[head / p.G * p.seen.S + s]) ++s;
    return s < end ? s : p.seen.S;
  }
  __device__ int first_key(int t) const {
    const SeenLists& l = p.lists;
    if (!l.lo) return first_kept(p.seen.lo(t), p.seen.hi(t));
    const int s = l.from ? first_kept(l.from[t], l.to[t]) : p.seen.S;
    return s < p.seen.S ? s : first_kept(l.lo[t], l.hi[head / p.G * l.hi_batch + t]);
  }
  __device__ bool spoils(int t) const {
    const int own = t + p.seen.S - p.seen.T;
    const int s = own > 0 ? first_key(t) : own;
    return s < own && counts[s] < counts[own];
  }
};

__global__ __launch_bounds__(kScanThreads) void spoil_rows_kernel(
    const __grid_constant__ SpoiledRows p) {
  const GatedHead head(p);
  int any = 0;
#pragma unroll 8
  for (int s = int(threadIdx.x); s < p.seen.S; s += kScanThreads) any |= head.is_nan(s);
  if (!__syncthreads_or(any)) return;
  running_sums(
      p.seen.S, 0, [&](int s) { return head.is_nan(s) ? 1 : 0; },
      [&](int s, double n) { head.counts[s] = int(n); });
  const int each = p.H / p.G;
  const bool last = head.spoils(p.seen.T - 1);
  for (int t = warp(); t < p.seen.T; t += kScanThreads / 32) {
    const bool own = head.spoils(t);
    for (const SpoiledRows::Rows& rows : p.rows) {
      if (!rows.x || !(rows.by_last ? last : own)) continue;
      for (int h = 0; h < each; ++h) {
        const int64_t row = (head.head * each + h) * p.seen.T + t;
        for (int c = lane(); c < rows.channels; c += 32) rows.x.set(row * rows.channels + c, NAN);
      }
    }
  }
}

// A key head and its running sums.
struct GateHead {
  const GateSums& p;
  int64_t b, head;  // b G + g
  double *sums, *counts, *d_sums;

  __device__ explicit GateHead(const GateSums& p) : p(p), b(blockIdx.x / p.G), head(blockIdx.x) {
    sums = p.scratch + head * gate_scratch(p);
    counts = sums + (counts_keys(p) ? p.seen.S + 1 : 0), d_sums = counts + p.seen.S + 1;
    sums_before(p.seen.S, sums, [&](int s) { return kept(s) ? share(s) : 0; });
    if (counts_keys(p)) sums_before(p.seen.S, counts, [&](int s) { return kept(s) ? 1 : 0; });
  }
  __device__ bool kept(int s) const { return !p.seen.keep || p.seen.keep[b * p.seen.S + s]; }
  __device__ double share(int s) const { return exp(double(p.gates[head * p.seen.S + s])); }
  __device__ float bound() const { return p.least == 0 ? kTinySum : p.least; }

  struct Row {
    float sum, count;  // count: factor of the sum
  };
  __device__ Row row(int t) const {
    const int hi = p.seen.hi(t), lo = min(p.seen.lo(t), hi);
    float count = 1;
    if (p.times_count)
      count = fmaxf(counts_keys(p) ? float(counts[hi] - counts[lo]) : float(hi - lo), 1);
    return {float(sums[hi] - sums[lo]), count};
  }
  // Calls f with the index of row t in each query head.
  template <class F>
  __device__ void each_row(int t, const F& f) const {
    const int heads = p.H / p.G;
    for (int h = 0; h < heads; ++h) f((head * heads + h) * p.seen.T + t);
  }
};

__global__ __launch_bounds__(kScanThreads) void gate_divisor_kernel(
    const __grid_constant__ GateSums p) {
  const GateHead head(p);
  for (int t = int(threadIdx.x); t < p.seen.T; t += kScanThreads) {
    const auto [sum, count] = head.row(t);
    const float Z = (sum < head.bound() ? head.bound() : sum) * count;
    head.each_row(t, [&](int64_t at) { p.divisor[at] = Z; });
  }
}

__global__ __launch_bounds__(kScanThreads) void gate_divisor_backward_kernel(
    const __grid_constant__ GateSums p) {
  const GateHead head(p);
  sums_before(p.seen.T, head.d_sums, [&](int t) -> double {
    const auto [sum, count] = head.row(t);
    double d_sum = 0;
    head.each_row(t, [&](int64_t at) { d_sum += p.d_divisor[at]; });
    return sum < head.bound() ? 0 : d_sum * count;
  });
  for (int s = int(threadIdx.x); s < p.seen.S; s += kScanThreads) {
    const int end = p.seen.end_query(s + 1), first = min(p.seen.first_query(s), end);
    const double d_sum = head.kept(s) ? head.d_sums[end] - head.d_sums[first] : 0;
    p.d_gates.set(head.head * p.seen.S + s, d_sum == 0 ? 0 : float(d_sum * head.share(s)));
  }
}

// A row's value without its learned factor.
__device__ inline float counted_row(const CountedRows& p, int t) {
  return p.scale * logf(float(max(p.seen.hi(t) - p.seen.lo(t), 1)));
}

__global__ __launch_bounds__(kScanThreads) void counted_rows_kernel(
    const __grid_constant__ CountedRows p) {
  const int t = int(blockIdx.y * kScanThreads + threadIdx.x);
  const float learned = p.learned ? p.learned[blockIdx.x % unsigned(p.H)] : 1;
  if (t < p.seen.T) p.value[int64_t(blockIdx.x) * p.seen.T + t] = learned * counted_row(p, t);
}

// One block per head.
__global__ __launch_bounds__(kScanThreads) void counted_rows_backward_kernel(
    const __grid_constant__ CountedRows p) {
  __shared__ double of_warps[kScanThreads / 32];
  const int h = int(blockIdx.x);
  double sum = 0;
  for (int t = int(threadIdx.x); t < p.seen.T; t += kScanThreads) {
    float d = 0;
    for (int b = 0; b < p.B; ++b) d += p.d_value[(int64_t(b) * p.H + h) * p.seen.T + t];
    sum += d * counted_row(p, t);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane() == 0) of_warps[warp()] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kScanThreads / 32; ++w) sum += of_warps[w];
  p.d_learned.set(h, float(sum));
}

void gate_divisor(const GateSums& p, Stream stream) {
  launch(gate_divisor_kernel, Grid{int64_t(p.B) * p.G, 1, kScanThreads, 0}, stream, p);
}
void gate_divisor_backward(const GateSums& p, Stream stream) {
  launch(gate_divisor_backward_kernel, Grid{int64_t(p.B) * p.G, 1, kScanThreads, 0}, stream, p);
}
void decay_sums(const DecaySums& p, Stream stream) {
  start_decay<false>(p, stream);
}
void decay_sums_backward(const DecaySums& p, Stream stream) {
  start_decay<true>(p, stream);
}
void spoil_rows(const SpoiledRows& p, Stream stream) {
  launch(spoil_rows_kernel, Grid{int64_t(p.B) * p.G, 1, kScanThreads, 0}, stream, p);
}
void counted_rows(const CountedRows& p, Stream stream) {
  const Grid grid{int64_t(p.B) * p.H, ceil_div(p.seen.T, kScanThreads), kScanThreads, 0};
  launch(counted_rows_kernel, grid, stream, p);
}
void counted_rows_backward(const CountedRows& p, Stream stream) {
  launch(counted_rows_backward_kernel, Grid{p.H, 1, kScanThreads, 0}, stream, p);
}

}  // namespace horner::attn::kernels::cuda

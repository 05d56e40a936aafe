// The first step of backward: from the gradient of the result to that of the sums, row by row. It
// waits for memory alone: a warp has several rows at once, some of them on their way, and what is
// one number a row is done by one lane for each row.
#pragma once

#include "attn/exec/kernels/fused_cuda_epilogue.cuh"

namespace horner::attn::kernels::cuda {

inline constexpr int kRowThreads = kRowsOfBlock;  // 32 rows a warp

// Eight channels, as they lie in memory.
template <class T>
struct Eight {
  uint4 words[sizeof(T) / 2];

  __device__ void load(const T* x) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) / 2; ++i)
      words[i] = __ldcs(reinterpret_cast<const uint4*>(x) + i);
  }
  __device__ Lanes<8> numbers() const {
    const T* const x = reinterpret_cast<const T*>(words);
    return lanes<8>([&](int i) { return float(x[i]); });
  }
  __device__ void store(T* y, const Lanes<8>& x) {
    T* const numbers = reinterpret_cast<T*>(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) numbers[i] = T(x[i]);
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) / 2; ++i) reinterpret_cast<uint4*>(y)[i] = words[i];
  }
};
template <int lanes_of_row>
__device__ inline float row_sum(float x) {
#pragma unroll
  for (int step = 1; step < lanes_of_row; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// The block's share of dq_sum, which has `dq_row` floats for each row, whole tiles of `dq_rows`.
__device__ inline void clear_sums(const Fused& f, int64_t head, int t0) {
  const int64_t rows = int64_t(f.T + f.dq_rows - 1) / f.dq_rows * f.dq_rows;
  const int n = int(min(int64_t(kRowsOfBlock), rows - t0)) * f.dq_row / 4;
  float4* const to = reinterpret_cast<float4*>(f.dq_sum + (head * rows + t0) * f.dq_row);
  for (int i = int(threadIdx.x); i < n; i += kRowThreads) to[i] = float4{};
}

// Kinds of epilogues: without a norm nothing but a product of rows is wanted; of a learned norm the
// gradients are gathered too.
enum class RowKind { plain, normed, learned };

// What a lane has of its own row, one of the warp's 32.
struct OwnRow {
  bool inside;
  int64_t row;
  float W, shift, r, post, on;

  __device__ OwnRow(const Fused& f, int64_t head, int t)
      : inside(t < f.T), row(head * f.T + min(t, f.T - 1)) {
    W = f.W[row], shift = f.shift[row], r = f.r[row];
    post = f.epilogue.post_gate ? f.epilogue.post_gate[row] : 1;
    on = r == 0 || !inside ? 0 : post;
  }
  // From the sums over its channels to what the keys need.
  __device__ void finish(const Fused& f, bool is_exp, float dot, float d_post) const {
    if (!inside) return;
    const Epilogue& p = f.epilogue;
    if (p.d_post_gate) p.d_post_gate[row] = r == 0 ? 0 : d_post;
    const RowGradient d = row_gradient(p, f.channels, row, dot, W, shift, r);
    // Without g the gradient of the result stands for it, without the gate after the norm.
    const float by = is_exp ? shift : 0, unit = is_exp ? 1 : expf(-shift);
    const float sub = (f.centre ? f.centre[row] : 0) + by, per = is_exp ? kLog2e : 1;
    f.queries[row] = {sub * per, (f.clamp - by) * per, d.a * unit * (f.g ? 1 : post), d.dW * unit};
    if (f.d_decay_query) f.d_decay_query[row] = d.pull;
  }
};

template <class T, int C, RowKind kind>
__global__ __launch_bounds__(kRowThreads) void rows_kernel(const __grid_constant__ Fused f,
                                                           bool is_exp) {
  constexpr bool kLearned = kind == RowKind::learned;
  constexpr int n = 8, kLanes = C / n, kRows = 32 / kLanes;  // rows at once, of a warp
  constexpr int kAhead = 32 / kRows < 4 ? 32 / kRows : sizeof(T) == 2 ? 4 : 2;
  const Epilogue& p = f.epilogue;
  const int blocks = (f.T + kRowsOfBlock - 1) / kRowsOfBlock;
  const int64_t head = blockIdx.x / unsigned(blocks);
  const int t0 = int(blockIdx.x % unsigned(blocks)) * kRowsOfBlock, first_row = t0 + warp() * 32;
  const int first = lane() % kLanes * n, sub = lane() / kLanes;  // channel; row among those at once
  const bool real = first < f.E;
  const T* const us = static_cast<const T*>(f.u ? f.u : f.o) + head * f.T * f.E + first;
  const T* const dus = row_of<T>(f.d_o, int(head / f.H), int(head % f.H), 0) + first;
  const OwnRow own(f, head, first_row + lane());
  const auto mask = [&](Lanes<n>& x) {
    if (f.channels == f.E) return;
#pragma unroll
    for (int i = 0; i < n; ++i) x[i] = first + i < f.channels ? x[i] : 0;
  };
  Lanes<n> weight, bias{}, d_weight{}, d_bias{};
  if constexpr (kLearned) {
    weight = lanes<n>([&](int i) { return first + i < f.channels ? p.norm_weight[first + i] : 0; });
    if (p.norm_bias)
      bias = lanes<n>([&](int i) { return first + i < f.channels ? p.norm_bias[first + i] : 0; });
  }
  if (f.dq_sum) clear_sums(f, head, t0);
  const bool asks = kind != RowKind::plain || (p.by_sum && !p.detach) || p.d_out_gate ||
                    p.d_post_gate || p.d_divisor || f.d_decay_query;
  float own_dot = 0, own_post = 0;
  Eight<T> u_words[kAhead] = {}, du_words[kAhead] = {};
#pragma unroll 1
  for (int k = 0; asks && k < 32 && first_row + k < f.T; k += kAhead * kRows) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t t = min(first_row + k + j * kRows + sub, f.T - 1);
      if (real) u_words[j].load(us + t * f.E), du_words[j].load(dus + t * f.d_o.row);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int at = k + j * kRows;  // whose rows are the warp's, from first_row on
      const Lanes<n> u = u_words[j].numbers();
      Lanes<n> du = du_words[j].numbers();
      mask(du);
      const auto total = [](float x) { return row_sum<kLanes>(x); };
      float dot, d_post = 0;
      if constexpr (kind == RowKind::plain) {
        dot = sum_over<n>(total, [&](int i) { return du[i] * u[i]; });
        d_post = dot, dot *= __shfl_sync(~0u, own.on, at + sub);
      } else {
        const float on = __shfl_sync(~0u, own.on, at + sub), r = __shfl_sync(~0u, own.r, at + sub);
        if (p.post_gate)
          d_post = sum_over<n>(
              total, [&](int i) { return du[i] * (kLearned ? u[i] * weight[i] + bias[i] : u[i]); });
        du = du * on;
        if constexpr (kLearned) {
          d_weight = d_weight + du * u, d_bias = d_bias + du;
          du = du * weight;
        }
        dot = sum_over<n>(total, [&](int i) { return du[i] * u[i]; });
        const float by_u = by_normed(p, f.channels, dot, r);
        const float less =
            p.norm == Epilogue::layer
                ? sum_over<n>(total, [&](int i) { return du[i]; }) / float(f.channels)
                : 0;
        du = lanes<n>([&](int i) { return du[i] - less - u[i] * by_u; });
        mask(du);
        const int t = first_row + at + sub;
        if (f.g && real && t < f.T)
          du_words[j].store(static_cast<T*>(f.g) + (head * f.T + t) * f.E + first, du);
      }
      // To the lane whose row it is.
      const float dot_here = __shfl_sync(~0u, dot, lane() % kRows * kLanes);
      const float post_here = __shfl_sync(~0u, d_post, lane() % kRows * kLanes);
      if (lane() / kRows * kRows == at) own_dot = dot_here, own_post = post_here;
    }
  }
  own.finish(f, is_exp, own_dot, own_post);
  if constexpr (kLearned) {
    constexpr int kSums = kRowThreads / kLanes;
    __shared__ float sums[2][kSums][C];
    const int at = int(threadIdx.x) / kLanes;
#pragma unroll
    for (int i = 0; i < n; ++i)
      sums[0][at][first + i] = d_weight[i], sums[1][at][first + i] = d_bias[i];
    __syncthreads();
    for (int c = int(threadIdx.x); c < f.E; c += kRowThreads) {
      float sum[2] = {};
      for (int k = 0; k < kSums; ++k) sum[0] += sums[0][k][c], sum[1] += sums[1][k][c];
      p.d_norm[2 * int64_t(blockIdx.x) * f.E + c] = sum[0];
      p.d_norm[(2 * int64_t(blockIdx.x) + 1) * f.E + c] = sum[1];
    }
  }
}

}  // namespace horner::attn::kernels::cuda

// First step of backward: from the result's gradient to that of the sums (dN = a g, dW), row by
// row. Memory-bound: a warp processes several rows at once and keeps more loads in flight; one lane
// per row computes the row's scalars.
#pragma once

#include "attn/kernels/cuda/common/epilogue.cuh"

namespace horner::attn::kernels::cuda {

inline constexpr int kRowThreads = kRowsPerBlock;  // 32 rows per warp

// Eight channels as stored in memory.
template <class T>
struct Vector8 {
  uint4 words[sizeof(T) / 2];

  __device__ void load(const T* x) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) / 2; ++i)
      words[i] = __ldcs(reinterpret_cast<const uint4*>(x) + i);
  }
  __device__ Vec<8> numbers() const {
    const T* const x = reinterpret_cast<const T*>(words);
    return vec<8>([&](int i) { return float(x[i]); });
  }
  __device__ void store(T* y, const Vec<8>& x) {
    T* const numbers = reinterpret_cast<T*>(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) numbers[i] = T(x[i]);
#pragma unroll
    for (int i = 0; i < int(sizeof(T)) / 2; ++i) reinterpret_cast<uint4*>(y)[i] = words[i];
  }
};
template <int lanes_per_row, class Sum>
__device__ inline Sum row_sum(Sum x) {
#pragma unroll
  for (int step = 1; step < lanes_per_row; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Clears the block's part of dq_sum: `dq_row` floats per row, whole tiles of `dq_rows` rows.
__device__ inline void clear_sums(const Fused& f, int64_t head, int t0) {
  const int64_t rows = int64_t(f.T + f.dq_rows - 1) / f.dq_rows * f.dq_rows;
  const int n = int(min(int64_t(kRowsPerBlock), rows - t0)) * f.dq_row / 4;
  float4* const to = reinterpret_cast<float4*>(f.dq_sum + (head * rows + t0) * f.dq_row);
  for (int i = int(threadIdx.x); i < n; i += kRowThreads) to[i] = float4{};
}

// Kinds of epilogue: without a norm only a row's dot product is needed; a learned norm also
// accumulates its gradients.
enum class RowKind { plain, norm_row, learned };

// Without a norm: whether anything needs the dot product of a row and its gradient.
__device__ inline bool needs_row_dot(const Fused& f) {
  const Epilogue& p = f.epilogue;
  return (p.by_sum && !p.detach) || p.d_out_gate || p.d_post_gate || p.d_divisor || p.d_sink;
}

// Sums over a row's channels, for the lane that owns the row.
struct RowSums {
  float dot, d_post;
  float along = 0;  // the part along the row, times a, that rounding added to g
};

// Per-row values of a lane's own row, one of the warp's 32.
struct LaneRow {
  bool inside;
  int64_t row;
  float W, shift, r, mean, post, on;

  __device__ LaneRow(const Fused& f, int64_t head, int t)
      : inside(t < f.T), row(head * f.T + min(t, f.T - 1)) {
    W = f.W[row], shift = f.shift[row], r = f.r[row];
    mean = f.mean ? f.mean[row] : 0;
    post = f.epilogue.post_gate ? f.epilogue.post_gate[row] : 1;
    on = r == 0 || !inside ? 0 : post;
  }
  // From the sums over channels to the row's `Query`.
  template <class T>
  __device__ void finish(const Fused& f, bool is_exp, const RowSums& sums) const {
    if (!inside) return;
    const Epilogue& p = f.epilogue;
    if (p.d_post_gate) p.d_post_gate.set(row, r == 0 ? 0 : sums.d_post);
    RowGradient d = row_gradient(p, f.channels, row, sums.dot, W, shift, r);
    if (sums.along != 0 && r != 0 && fabsf(W) > kLeastSum) d.dW -= sums.along / W;
    // Without g, d_o is used instead; it lacks the gate after the norm. Weights that have a
    // threshold are relative to the shift already.
    const float by = is_exp ? shift : 0, unit = is_exp || f.thresholds ? 1 : expf(-shift);
    const float sub = (f.centre ? f.centre[row] : 0) + by, per = is_exp ? kLog2e : 1;
    f.queries[row] = {sub * unit_of_sub(is_exp, sizeof(T) == 4), (last_clamp(f) - by) * per,
                      d.a * unit * (f.g ? 1 : post) * f.dropout.kept, d.dW * unit};
  }
};

// The learned norm of a lane's eight channels, and its accumulated gradients.
struct LaneNorm {
  Vec<8> weight, bias, d_weight{}, d_bias{};

  __device__ LaneNorm(const Fused& f, int first) {
    const auto load = [&](const float* x) {
      return vec<8>([&](int i) { return x && first + i < f.channels ? x[first + i] : 0; });
    };
    weight = load(f.epilogue.norm_weight), bias = load(f.epilogue.norm_bias);
  }
  // Sums over the block; `lanes_per_row` lanes hold the channels of a row.
  template <int lanes_per_row>
  __device__ void store(const Fused& f) const {
    constexpr int kSums = kRowThreads / lanes_per_row;
    __shared__ float sums[2][kSums][8 * lanes_per_row];
    const int at = int(threadIdx.x) / lanes_per_row, first = lane() % lanes_per_row * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sums[0][at][first + i] = d_weight[i], sums[1][at][first + i] = d_bias[i];
    __syncthreads();
    for (int c = int(threadIdx.x); c < 2 * f.E; c += kRowThreads) {
      float sum = 0;
      for (int k = 0; k < kSums; ++k) sum += sums[c / f.E][k][c % f.E];
      f.epilogue.d_norm_parts[2 * int64_t(blockIdx.x) * f.E + c] = sum;
    }
  }
};

template <int lanes_per_row, class Sum>
__device__ inline RowSums plain_sums(const Vec<8>& u, const Vec<8>& du, float on) {
  Sum sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += Sum(du[i]) * Sum(u[i]);
  const float dot = float(row_sum<lanes_per_row>(sum));
  return {dot * on, dot};
}
// The factor by_u in the gradient of y, r (du - mean - u by_u). It divides by the actual u.u, not
// by its value for an exact u and r, so that the part of du along u cancels to the last bits of
// `Sum`.
template <int lanes_per_row, class Sum>
__device__ inline Sum norm_projection(const Epilogue& p, int channels, const Vec<8>& u,
                                      const Vec<8>& du, float r, float shift) {
  Sum dot = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) dot += Sum(du[i]) * Sum(u[i]), squares += Sum(u[i]) * Sum(u[i]);
  dot = row_sum<lanes_per_row>(dot), squares = row_sum<lanes_per_row>(squares);
  if (p.norm != Epilogue::l2)
    squares += Sum(channels) * p.eps * (p.by_sum ? 1 : expf(-2 * shift)) * r * r;
  return squares > 0 && !norm_is_clamped(p, channels, r) ? dot / squares : 0;
}
// Lets one channel take what rounding added to g along the row: one that is no small part of the
// row, and of these the one with the finest steps. At most half a step of it is left.
template <class T, int lanes_per_row, class Sum>
__device__ inline void remove_along_row(const Vec<8>& row, int channels, Sum along, Vec<8>& g) {
  constexpr float kShare = 0.25f;  // of the mean square
  float squares = 0, step = INFINITY;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += row[i] * row[i];
  squares = row_sum<lanes_per_row>(squares);
  int at = -1;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float share = row[i] * row[i] * float(channels), size = fabsf(g[i] * row[i]);
    if (share > 0 && share >= kShare * squares && size < step) step = size, at = i;
  }
  float least = step;
#pragma unroll
  for (int i = 1; i < lanes_per_row; i *= 2) least = fminf(least, __shfl_xor_sync(~0u, least, i));
  const uint32_t lanes = __ballot_sync(~0u, at >= 0 && step == least);
  const int first = lane() / lanes_per_row * lanes_per_row;
  if (__ffs(lanes >> first) - 1 != lane() - first) return;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i == at) g[i] = float(T(float(Sum(g[i]) - along / Sum(row[i]))));
}
// From the result's gradient to the gradient of y divided by r, rounded, in place. `mean` is what a
// LayerNorm subtracted from the row, times r.
template <class T, int lanes_per_row, bool learned, bool exact_along_row, class Sum>
__device__ inline RowSums normed_sums(const Fused& f, float on, float r, float shift, float mean,
                                      const Vec<8>& u, Vec<8>& du, LaneNorm& norm) {
  const Epilogue& p = f.epilogue;
  const auto total = [](float x) { return row_sum<lanes_per_row>(x); };
  const int first = lane() % lanes_per_row * 8;
  RowSums sums{};
  if (p.post_gate)
    sums.d_post = sum_over<8>(total, [&](int i) {
      return du[i] * (learned ? u[i] * norm.weight[i] + norm.bias[i] : u[i]);
    });
  du = du * on;
  if constexpr (learned) {
    norm.d_weight = norm.d_weight + du * u, norm.d_bias = norm.d_bias + du;
    du = du * norm.weight;
  }
  sums.dot = sum_over<8>(total, [&](int i) { return du[i] * u[i]; });
  const Sum by_u = norm_projection<lanes_per_row, Sum>(p, f.channels, u, du, r, shift);
  Sum less = 0;
  if (p.norm == Epilogue::layer) {
#pragma unroll
    for (int i = 0; i < 8; ++i) less += Sum(du[i]);
    less = row_sum<lanes_per_row>(less) / Sum(f.channels);
  }
  if constexpr (!exact_along_row) {
    du = vec<8>([&](int i) { return du[i] - less - u[i] * by_u; });
    return sums;
  }
  Sum along = 0;
  Vec<8> row;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Sum exact = Sum(du[i]) - less - Sum(u[i]) * by_u;
    row[i] = first + i < f.channels ? u[i] + mean : 0;
    du[i] = float(T(float(exact)));
    along += (Sum(du[i]) - exact) * Sum(row[i]);
  }
  along = row_sum<lanes_per_row>(along);
  // In float16 without decay no sum of weights comes near 0, and dW cancels it.
  if (std::is_same_v<T, fp16> && !f.decay) {
    sums.along = float(along);
  } else {
    remove_along_row<T, lanes_per_row>(row, f.channels, along, du);
  }
  return sums;
}

template <class T, int C, RowKind kind, bool has_rest = std::is_same_v<T, fp16>>
__global__ __launch_bounds__(kRowThreads) void row_gradients_kernel(const __grid_constant__ Fused f,
                                                                    bool is_exp) {
  constexpr int kLanes = C / 8, kRows = 32 / kLanes;  // rows at once per warp
  constexpr int kAhead = 32 / kRows < 4 ? 32 / kRows : sizeof(T) == 2 ? 4 : 2;
  const int blocks = (f.T + kRowsPerBlock - 1) / kRowsPerBlock;
  // Last head first: it was written last, and the backward kernel starts with the first.
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const int64_t head = block / unsigned(blocks);
  const int t0 = int(block % unsigned(blocks)) * kRowsPerBlock, first_row = t0 + warp() * 32;
  const int first = lane() % kLanes * 8, sub = lane() / kLanes;  // channel; row of kRows
  const bool real = first < f.E;
  const int64_t at_head = head * f.T * f.E + first;
  const T* const us = static_cast<const T*>(f.u ? f.u : f.o) + at_head;
  const T* const dus = row_of<T>(f.d_o, int(head / f.H), int(head % f.H), 0) + first;
  T* const gs = static_cast<T*>(f.g) + at_head;
  const LaneRow own(f, head, first_row + lane());
  LaneNorm norm(f, first);
  const bool needs_dot = kind != RowKind::plain || needs_row_dot(f);
  RowSums own_sums{};
  Vector8<T> u_words[kAhead] = {}, du_words[kAhead] = {};
  constexpr bool kExact = kExactAlongRow<T> || has_rest;
  const T* const rests = static_cast<const T*>(f.rest) + at_head;
  Vector8<T> rest_words[has_rest ? kAhead : 1] = {};
#pragma unroll 1
  for (int k = 0; needs_dot && k < 32 && first_row + k < f.T; k += kAhead * kRows) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t t = min(first_row + k + j * kRows + sub, f.T - 1);
      if (real) u_words[j].load(us + t * f.E), du_words[j].load(dus + t * f.d_o.row);
      if (has_rest && f.rest && real) rest_words[j].load(rests + t * f.E);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int row = k + j * kRows + sub, t = first_row + row;  // row: in the warp
      const float on = __shfl_sync(~0u, own.on, row), r = __shfl_sync(~0u, own.r, row);
      Vec<8> u = u_words[j].numbers();
      if constexpr (has_rest) u = u + rest_words[j].numbers() * kRestUnit;
      Vec<8> du = du_words[j].numbers();
      RowSums sums;
      using Sum = std::conditional_t<sizeof(T) == 4, double, float>;
      if constexpr (kind == RowKind::plain) {
        sums = plain_sums<kLanes, Sum>(u, du, on);
      } else {
        const float shift = __shfl_sync(~0u, own.shift, row);
        const float mean = kExact ? __shfl_sync(~0u, own.mean, row) : 0;
        constexpr bool kLearned = kind == RowKind::learned;
        sums = normed_sums<T, kLanes, kLearned, kExact, Sum>(f, on, r, shift, mean, u, du, norm);
        if (real && t < f.T) du_words[j].store(gs + int64_t(t) * f.E, du);
      }
      // Send to the lane that owns the row.
      const float dot = __shfl_sync(~0u, sums.dot, lane() % kRows * kLanes);
      const float d_post = __shfl_sync(~0u, sums.d_post, lane() % kRows * kLanes);
      float along = 0;
      if constexpr (has_rest) along = __shfl_sync(~0u, sums.along, lane() % kRows * kLanes);
      if (lane() / kRows == k / kRows + j) own_sums = {dot, d_post, along};
    }
  }
  if (f.dq_sum) clear_sums(f, head, t0);  // earlier, loads would queue behind it
  own.finish<T>(f, is_exp, own_sums);
  if constexpr (kind == RowKind::learned) norm.store<kLanes>(f);
}

// Converts dq_sum from fragment order to rows. Each block owns a tile of kDqTile rows.
template <class T, int C>
__global__ __launch_bounds__(128) void unpack_dq_kernel(const __grid_constant__ Fused f) {
  constexpr int kRow = C + 8;  // elements, so that rows start in different banks
  __shared__ __align__(16) T rows[kDqTile * kRow];
  // Last tile first: it was accumulated last and is in cache.
  const int64_t tiles = (f.T + kDqTile - 1) / kDqTile, tile = gridDim.x - 1 - blockIdx.x;
  const float4* const from =
      reinterpret_cast<const float4*>(f.dq_sum) + tile * (f.dq_row / 8) * 128 + threadIdx.x;
  T* const own = rows + (warp() * 16 + lane() / 4) * kRow + lane() % 4 * 2;
#pragma unroll
  for (int j = 0; j < C / 8; ++j) {
    if (8 * j >= f.D) break;
    const float4 y = __ldcs(from + j * 128);
    store_pair<T>(own, 8 * j, y.x * f.scale, y.y * f.scale);
    store_pair<T>(own, 8 * kRow + 8 * j, y.z * f.scale, y.w * f.scale);
  }
  __syncthreads();
  const int64_t first = tile / tiles * f.T + tile % tiles * kDqTile;
  const int real = min(kDqTile, f.T - int(tile % tiles) * kDqTile), chunks = f.D / 8;
  for (int i = int(threadIdx.x); i < real * chunks; i += 128) {
    const int row = i / chunks, c = i % chunks * 8;
    *reinterpret_cast<uint4*>(static_cast<T*>(f.dq) + (first + row) * f.D + c) =
        *reinterpret_cast<const uint4*>(rows + row * kRow + c);
  }
}

}  // namespace horner::attn::kernels::cuda

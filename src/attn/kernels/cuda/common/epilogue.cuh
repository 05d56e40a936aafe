// The epilogue of a row: denominator, gates and norm, forward and backward. A row's channels are
// spread over a group of lanes; `total` sums over the group.
//   y = out * N / Z,   u = (y - mean) r,   o = post (u weight + bias)
// N and W are e^-shift times their true values; a divisor other than W leaves that factor in y, and
// only a norm's eps sees it. A row without weights has r = 0 and yields 0.
#pragma once

#include "attn/kernels/cuda/common/tiles.cuh"

namespace horner::attn::kernels::cuda {

__device__ inline float TypedPointer::operator[](int64_t i) const {
  if (dtype == Dtype::float32) return static_cast<const float*>(at)[i];
  if (dtype == Dtype::bfloat16) return float(static_cast<const bf16*>(at)[i]);
  return float(static_cast<const fp16*>(at)[i]);
}
__device__ inline void TypedPointer::set(int64_t i, float x) const {
  if (dtype == Dtype::float32) static_cast<float*>(at)[i] = x;
  if (dtype == Dtype::bfloat16) static_cast<bf16*>(at)[i] = bf16(x);
  if (dtype == Dtype::float16) static_cast<fp16*>(at)[i] = fp16(x);
}

inline constexpr float kTinySum = 1e-6f, kTinyLength = 1e-12f;
inline constexpr float kLeastSum = 1e-30f;  // below it, a sum has no inverse

struct Divisor {
  float Z;
  bool follows_w;
};
__device__ inline float keys_seen(const Epilogue& p, int64_t row) {  // at least 1
  const int t = int(uint32_t(row) % uint32_t(p.counted.T));
  return float(max(p.counted.hi(t) - p.counted.lo(t), 1));
}
__device__ inline Divisor divisor(const Epilogue& p, int64_t row, float W, float shift) {
  if (p.by_count) return {keys_seen(p, row), false};
  if (!p.by_sum) return {p.divisor ? p.divisor[row] : 1, false};
  float least = p.least;
  if (p.floor != 0)
    least = fmaxf(least, p.floor * (p.divisor ? p.divisor[row] : keys_seen(p, row)));
  const float unit = p.plus != 0 || least != 0 ? expf(-shift) : 0;
  Divisor d{p.plus != 0 ? W + p.plus * unit : W, !p.detach};
  if (p.sink) d.Z += expf(p.sink[row] - shift);  // inf: the keys have no share
  if (least != 0 && d.Z < least * unit) d = {least * unit, false};
  if (fabsf(d.Z) < kTinySum) d = {d.Z < 0 ? -kTinySum : kTinySum, false};
  return d;
}

template <int n, class Total, class F>
__device__ inline float sum_over(const Total& total, const F& f) {
  float s = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) s += f(i);
  return total(s);
}

// u = y r - mean
struct NormFactors {
  float r, mean;
};

// From N to u, in place. `channel(i)` is the channel of element i; those from `channels` on are
// zero padding.
template <int n, class Channel, class Total>
__device__ inline NormFactors norm_row(const Epilogue& p, int channels, int64_t row, Vec<n>& x,
                                       float W, float shift, const Channel& channel,
                                       const Total& total) {
  bool empty = W == 0;
  if (__any_sync(~0u, empty))  // rarely
    empty &= sum_over<n>(total, [&](int i) { return x[i] * x[i]; }) == 0;
  const float count = float(channels);
  const float by = (p.out_gate ? p.out_gate[row] : 1) / divisor(p, row, W, shift).Z;
  if (p.norm == Epilogue::none) {
    const float r = empty ? 0 : p.by_sum ? 1 : expf(shift);
    x = x * by * r;
    return {r, 0};
  }
  float mean = 0, r = 1;
  if (p.norm == Epilogue::layer)
    mean = sum_over<n>(total, [&](int i) { return x[i]; }) * by / count;
  x = vec<n>([&](int i) { return x[i] * by - mean; });
  if (channel(n - 1) >= channels)  // this lane holds padding
    x = vec<n>([&](int i) { return channel(i) < channels ? x[i] : 0; });
  const float squares = sum_over<n>(total, [&](int i) { return x[i] * x[i]; });
  if (p.norm == Epilogue::l2) {
    r = (p.times_dim ? count : 1) / fmaxf(sqrtf(squares), kTinyLength);
  } else {
    r = 1 / sqrtf(squares / count + p.eps * (p.by_sum ? 1 : expf(-2 * shift)));
  }
  if (empty) r = 0;
  x = x * r;
  return {r, mean * r};
}

// Applies the norm's weight and bias, in place. No branches, so that all loads are in flight.
template <int n, class Channel>
__device__ inline void apply_norm_weight(const Epilogue& p, int channels, Vec<n>& x,
                                         const Channel& channel) {
  const auto load = [&](const float* from) {
    return vec<n>([&](int i) { return from[min(channel(i), channels - 1)]; });
  };
  if (p.norm_weight) x = x * load(p.norm_weight);
  if (!p.norm_bias) return;
  const Vec<n> y = load(p.norm_bias);
  x = vec<n>([&](int i) { return channel(i) < channels ? x[i] + y[i] : 0; });
}

// Where a row is normalised or divided by its sum, its gradient g has no part along the row. What
// rounding adds along it moves all keys of the row alike, and does not average out in dq. bfloat16
// is as exact as the reference, which rounds the row too; in float16 and float32 the part along the
// row stays exact (row_gradients.cuh).
template <class T>
inline constexpr bool kExactAlongRow = !std::is_same_v<T, bf16>;

// What rounding to T takes from x, as a T: in units of 2^-11 it is as large as x.
inline constexpr float kRestUnit = 0x1p-11f;
template <class T>
__device__ inline float rest_of(float x) {
  return (x - float(T(x))) / kRestUnit;
}

// dN = a g, and dW.
struct RowGradient {
  float a, dW;
};

// Whether the row is so short that its norm only scales it.
__device__ inline bool norm_is_clamped(const Epilogue& p, int channels, float r) {
  return p.norm == Epilogue::l2 && r >= (p.times_dim ? float(channels) : 1) / kTinyLength;
}

// From du.u to the gradients of N, W, the gates and the divisor.
__device__ inline RowGradient row_gradient(const Epilogue& p, int channels, int64_t row, float dot,
                                           float W, float shift, float r) {
  // y = N out / Z: the gradients of out and Z are dy.y / out and -dy.y / Z. A norm removes the
  // scale of y except through its eps, so dy.y is what the eps leaves of it.
  float dy_y = dot;
  if (p.norm == Epilogue::l2 && !norm_is_clamped(p, channels, r)) dy_y = 0;
  if (p.norm == Epilogue::rms || p.norm == Epilogue::layer)
    dy_y = dot * p.eps * (p.by_sum ? 1 : expf(-2 * shift)) * r * r;
  const Divisor d = divisor(p, row, W, shift);
  const float out = p.out_gate ? p.out_gate[row] : 1, dZ = -dy_y / d.Z;
  if (p.d_out_gate) p.d_out_gate.set(row, r == 0 ? 0 : dy_y / out);
  if (p.d_divisor) p.d_divisor[row] = r == 0 ? 0 : dZ;
  if (p.d_sink) {
    const float e = expf(p.sink[row] - shift), share = e < INFINITY ? e / d.Z : 1;
    p.d_sink[row] = r == 0 || !d.follows_w ? 0 : -dy_y * share;
  }
  if (r == 0) return {};
  return {r * out / d.Z, d.follows_w ? dZ : 0};
}

}  // namespace horner::attn::kernels::cuda

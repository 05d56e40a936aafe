// What happens to a row after its sums: denominator, gates and norm, forward and backward. The
// channels of a row lie spread over a group of lanes: `total` adds over the group.
//   y = out * N / Z,   u = (y - mean) r,   o = post (u weight + bias)
// N and W are e^-shift times their true values; a divisor that is not their sum leaves that factor
// in y, and only the eps of a norm sees it. A row without weights has r = 0 and gives 0.
#pragma once

#include "attn/exec/kernels/fused_cuda_tiles.cuh"

namespace horner::attn::kernels::cuda {

inline constexpr float kTinySum = 1e-6f, kTinyLength = 1e-12f;

struct Divisor {
  float Z;
  bool follows_w;
};
__device__ inline Divisor divisor(const Epilogue& p, int64_t row, float W, float shift) {
  if (!p.by_sum) return {p.divisor ? p.divisor[row] : 1, false};
  const float unit = p.plus != 0 || p.least != 0 ? expf(-shift) : 0;
  Divisor d{p.plus != 0 ? W + p.plus * unit : W, !p.detach};
  if (p.least != 0 && d.Z < p.least * unit) d = {p.least * unit, false};
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

// From N to u, in place; returns r. `channel(i)` is the channel of number i; those from `channels`
// on are padding, of zeros.
template <int n, class Channel, class Total>
__device__ inline float normed(const Epilogue& p, int channels, int64_t row, Lanes<n>& x, float W,
                               float shift, const Channel& channel, const Total& total) {
  bool empty = W == 0;
  if (__any_sync(~0u, empty))  // rarely
    empty &= sum_over<n>(total, [&](int i) { return x[i] * x[i]; }) == 0;
  const float count = float(channels);
  const float by = (p.out_gate ? p.out_gate[row] : 1) / divisor(p, row, W, shift).Z;
  if (p.norm == Epilogue::none) {
    const float r = empty ? 0 : p.by_sum ? 1 : expf(shift);
    x = x * by * r;
    return r;
  }
  x = x * by;
  float mean = 0, r = 1;
  if (p.norm == Epilogue::layer) mean = sum_over<n>(total, [&](int i) { return x[i]; }) / count;
  const float squares = sum_over<n>(
      total, [&](int i) { return channel(i) < channels ? (x[i] - mean) * (x[i] - mean) : 0; });
  if (p.norm == Epilogue::l2) {
    r = (p.times_dim ? count : 1) / fmaxf(sqrtf(squares), kTinyLength);
  } else {
    r = 1 / sqrtf(squares / count + p.eps * (p.by_sum ? 1 : expf(-2 * shift)));
  }
  if (empty) r = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) x[i] = channel(i) < channels ? (x[i] - mean) * r : 0;
  return r;
}

// What follows u.
__device__ inline float scaled(const Epilogue& p, int channels, int channel, float u) {
  if (channel >= channels) return 0;
  if (p.norm_weight) u *= p.norm_weight[channel];
  return p.norm_bias ? u + p.norm_bias[channel] : u;
}

// The gradient of N is a g, that of W dW; `pull` is N dN + W dW, the gradient of the row's weights
// times themselves.
struct RowGradient {
  float a, dW;
  double pull;
};

// From du, the gradient of u, to g, in place. One lane of the group writes the gates' gradients.
template <int n, class Total>
__device__ inline RowGradient row_gradient(const Epilogue& p, int channels, int64_t row,
                                           bool writes, const Lanes<n>& u, Lanes<n>& du, float W,
                                           float shift, float r, const Total& total) {
  const float count = float(channels), unit = p.times_dim ? count : 1;
  const float dot = sum_over<n>(total, [&](int i) { return du[i] * u[i]; });
  const bool at_bound = p.norm == Epilogue::l2 && r >= unit / kTinyLength;
  float by_u = 0, less = 0, eps = 0;
  if (p.norm == Epilogue::l2 && !at_bound) by_u = dot / (unit * unit);
  if (p.norm == Epilogue::rms || p.norm == Epilogue::layer) {
    by_u = dot / count;
    eps = p.eps * (p.by_sum ? 1 : expf(-2 * shift));
  }
  if (p.norm == Epilogue::layer) less = sum_over<n>(total, [&](int i) { return du[i]; }) / count;
  du = lanes<n>([&](int i) { return du[i] - less - u[i] * by_u; });

  // y = N out / Z: the gradients of out and Z are dy.y over them. A norm sees the scale of y
  // through its eps alone, so there dy.y is what the eps leaves of it.
  const float dy_y = p.norm == Epilogue::none || at_bound ? dot : dot * eps * r * r;
  const Divisor d = divisor(p, row, W, shift);
  const float out = p.out_gate ? p.out_gate[row] : 1, dZ = -dy_y / d.Z;
  if (p.d_out_gate && writes) p.d_out_gate[row] = r == 0 ? 0 : dy_y / out;
  if (p.d_divisor && writes) p.d_divisor[row] = r == 0 ? 0 : dZ;
  if (r == 0) return {};
  const float dW = d.follows_w ? dZ : 0;
  return {r * out / d.Z, dW, double(dy_y) + double(W) * dW};
}

}  // namespace horner::attn::kernels::cuda

// The epilogue of one row, forward and backward: denominator, gates and norm.
//   y = out * N / Z,   o = post * norm(y)
// N and W are e^-shift times their true values. Dividing by W cancels that factor; another divisor
// leaves it in y, where only the eps of a norm has to account for it.
#pragma once

#include "attn/kernels/cpu/fused/fused.h"
#include "attn/kernels/cpu/vectors.h"

namespace horner::attn::kernels::HORNER_ISA {

static constexpr float kTinySum = 1e-6f, kTinyLength = 1e-12f;

template <class F>
static float over_channels(int64_t E, const F& f) {  // sum_e f(e), where f returns kWidth channels
  Vec s{};
  for (int64_t e = 0; e < E; e += kWidth) s += f(e);
  return sum(s);
}

// From the sums of one row to its result.
struct Row {
  const Epilogue& p;
  int64_t row;  // of [B, H, T]
  int64_t E;    // padded with zeros; p.channels of them are real
  const float* N;
  float W, shift;

  float Z, to_y;          // the divisor; y = N * to_y
  float kept = 1;         // N and W are multiplied by it: e^(shift - sink) for a larger sink
  float d_sink = 0;       // dZ / d sink
  float mean = 0, r = 1;  // of y: o = (y - mean) * r, before weight, bias and post
  float eps = 0;          // of the norm, at the scale of y
  bool z_follows_w = false;
  bool at_bound = false;  // the L2 norm of y is below its lower bound

  Row(const Epilogue& p, int64_t row, int64_t E, const float* N, float W, float shift)
      : p(p), row(row), E(E), N(N), W(W), shift(shift) {
    divide();
    to_y = (p.out_gate ? p.out_gate[row] : 1) * kept / Z;
    const float n = float(p.channels);
    if (p.norm == Epilogue::layer)
      mean = over_channels(E, [&](int64_t e) { return load(N + e); }) * to_y / n;
    if (p.norm == Epilogue::none) {
      r = p.by_sum ? 1 : expf(shift);
    } else if (p.norm == Epilogue::l2) {
      const float length = sqrtf(squares(0));
      at_bound = length <= kTinyLength;
      r = (p.times_dim ? n : 1) / (at_bound ? kTinyLength : length);
    } else {
      eps = p.eps * (p.by_sum ? 1 : expf(-2 * shift));
      r = 1 / sqrtf(squares(mean) / n + eps);
    }
  }

  void divide() {
    if (!p.by_sum) {
      Z = p.divisor ? p.divisor[row] : 1;
      return;
    }
    const float least = p.divisor ? std::max(p.least, p.divisor[row]) : p.least;
    float top = shift;  // relative to which Z is
    Z = W;
    if (p.sink) {
      const float sink = p.sink[row];
      if (sink > shift) kept = expf(shift - sink), top = sink;
      d_sink = expf(sink - top);
      Z = W * kept + d_sink;
    }
    const float unit = p.plus != 0 || least != 0 ? expf(-top) : 0;
    if (p.plus != 0) Z += p.plus * unit;
    z_follows_w = !p.detach;
    if (least != 0 && Z < least * unit) Z = least * unit, z_follows_w = false;
    if (fabsf(Z) < kTinySum) Z = Z < 0 ? -kTinySum : kTinySum, z_follows_w = false;
  }
  float squares(float centre) const {  // excludes the padding, which `centre` would make nonzero
    const int64_t whole = p.channels / kWidth * kWidth;
    float s = over_channels(whole, [&](int64_t e) {
      const Vec y = load(N + e) * to_y - centre;
      return y * y;
    });
    for (int64_t e = whole; e < p.channels; ++e)
      s += (N[e] * to_y - centre) * (N[e] * to_y - centre);
    return s;
  }
  // A row without weights gives 0, also with a bias.
  bool empty() const {
    return W == 0 && over_channels(E, [&](int64_t e) { return load(N + e) * load(N + e); }) == 0;
  }
  Vec normed(int64_t e) const { return (load(N + e) * to_y - mean) * r; }

  void forward(float* o) const {
    const float post = p.post_gate ? p.post_gate[row] : 1;
    for (int64_t e = 0; e < E; e += kWidth) {
      Vec y = normed(e);
      if (p.norm_weight) y *= load(p.norm_weight + e);
      if (p.norm_bias) y += load(p.norm_bias + e);
      store(o + e, y * post);
    }
    if (empty())
      for (int64_t e = 0; e < E; e += kWidth) store(o + e, Vec{});
  }

  // From the gradient of o to that of N (may be in place); returns the gradient of W.
  float backward(const float* d_o, float* d) const {
    if (empty()) {
      for (int64_t e = 0; e < E; e += kWidth) store(d + e, Vec{});
      if (p.d_out_gate) p.d_out_gate[row] = 0;
      if (p.d_post_gate) p.d_post_gate[row] = 0;
      if (p.d_divisor) p.d_divisor[row] = 0;
      if (p.d_sink) p.d_sink[row] = 0;
      return 0;
    }
    const float post = p.post_gate ? p.post_gate[row] : 1;
    Vec d_post{}, d_sum{}, d_dot{};  // of u = (y - mean) r
    for (int64_t e = 0; e < E; e += kWidth) {
      const Vec u = normed(e), given = load(d_o + e);
      Vec before = u, du = given * post;
      if (p.norm_weight) {
        const Vec w = load(p.norm_weight + e);
        before *= w;
        store(p.d_norm_weight + e, load(p.d_norm_weight + e) + du * u);
      }
      if (p.norm_bias) {
        before += load(p.norm_bias + e);
        store(p.d_norm_bias + e, load(p.d_norm_bias + e) + du);
      }
      d_post += given * before;
      if (p.norm_weight) du *= load(p.norm_weight + e);
      store(d + e, du);
      d_sum += du;
      d_dot += du * u;
    }
    if (p.d_post_gate) p.d_post_gate[row] = sum(d_post);
    const float dot = sum(d_dot);
    through_norm(d, sum(d_sum), dot);
    // y = N out / Z, so d_out = dy.y / out and dZ = -dy.y / Z. A norm is invariant to the scale of
    // y except through its eps, so with a norm dy.y is the eps term only.
    float dy_y = dot * eps * r * r;
    if (p.norm == Epilogue::none || at_bound)
      dy_y = over_channels(E, [&](int64_t e) { return load(d + e) * load(N + e); }) * to_y;
    const float out = p.out_gate ? p.out_gate[row] : 1;
    constexpr float kTinyGate = 1e-30f;  // y has few digits or none below it
    const float d_out =
        !(fabsf(out) < kTinyGate)
            ? dy_y / out
            : over_channels(E, [&](int64_t e) { return load(d + e) * load(N + e); }) * kept / Z;
    for (int64_t e = 0; e < E; e += kWidth) store(d + e, load(d + e) * to_y);
    if (p.d_out_gate) p.d_out_gate[row] = d_out;
    const float dZ = -dy_y / Z;
    if (p.d_divisor) p.d_divisor[row] = p.by_sum ? 0 : dZ;
    if (p.d_sink) p.d_sink[row] = z_follows_w ? dZ * d_sink : 0;
    return z_follows_w ? dZ * kept : 0;
  }

  // From the gradient of u = (y - mean) r to that of y.
  void through_norm(float* d, float d_sum, float d_dot) const {
    if (p.norm == Epilogue::none) {
      for (int64_t e = 0; e < E; e += kWidth) store(d + e, load(d + e) * r);
      return;
    }
    const float n = float(p.channels);
    float by_u = 0, less = 0;
    if (p.norm == Epilogue::l2) {
      const float unit = p.times_dim ? n : 1;  // |u| = unit, unless at_bound
      by_u = at_bound ? 0 : d_dot / (unit * unit);
    }
    if (p.norm == Epilogue::rms || p.norm == Epilogue::layer) by_u = d_dot / n;
    if (p.norm == Epilogue::layer) less = d_sum / n;
    for (int64_t e = 0; e < E; e += kWidth)
      store(d + e, (load(d + e) - less - normed(e) * by_u) * r);
  }
};

}  // namespace horner::attn::kernels::HORNER_ISA

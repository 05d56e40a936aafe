// Weights that depend on the whole row: find_threshold computes what they depend on, and parts
// their values and the factors of the score gradients, where dw is the gradient of a weight:
//   dx_s = slope_s dw_s - share_s sum_r pull_r dw_r
#pragma once

#include "attn/kernels/cpu/rows/rows.h"
#include "attn/kernels/cpu/rows/scores.h"

namespace horner::attn::kernels::HORNER_ISA {

// find_threshold: requires r.top, which is finite.

template <class W>
inline void find_threshold(const W&, const Scores&, RowThreshold& r) {
  if (!__is_same(W, Exp)) r.top = 0;
}

// z^(1 / a)
inline Vec power(Vec z, float a) {
  if (a == 1) return z;
  if (a == 0.5f) return z * z;
  return exp(log(z) * (1 / a));
}

// Newton's method for tau, from -1 up to where the weights p sum to 1. The sum is convex in tau,
// and so is its a-th power, which is closer to linear far from 1; so no step from the left
// overshoots. A key with (alpha - 1) x more than 1 below the top has weight 0 for every tau.
inline void find_threshold(const Entmax& w, const Scores& s, RowThreshold& r) {
  const float a = w.alpha - 1;
  int64_t n = 0;
  for (int64_t j = 0; j < s.n; ++j) {
    s.spare[n] = (s.x[j] - r.top) * a;
    n += s.spare[n] > -1;
  }
  for (int l = 0; l < kWidth; ++l) s.spare[n + l] = -1;
  r.cut = -1;
  for (int step = 0; step < 100; ++step) {
    Vec total{}, slope{};
    for (int64_t j = 0; j < n; j += kWidth) {
      const Vec z = max(load(s.spare + j) - r.cut, Vec{}), p = power(z, a);
      total += p;
      slope += choose(z > 0, p / z, Vec{});
    }
    r.sum = sum(slope);
    const float P = sum(total);
    const float up = P > 1.1f ? P - exp(log(splat(P)) * (1 - a))[0] : a * (P - 1);
    if (!(up > -6e-8f * r.cut * r.sum)) break;
    r.cut += up / r.sum;
  }
}

inline void find_threshold(const Softpick&, const Scores&, RowThreshold& r) {
  r.top = greater(r.top, 0);
}

inline void find_threshold(const TopK& w, const Scores& s, RowThreshold& r) {
  r.cut = kth_largest(s, w.k, r.top);
  r.sum = sum_of_exp(s, r.top, w.renormalise ? r.cut : -INFINITY);
}

inline void find_threshold(const SelfAdjusted&, const Scores& s, RowThreshold& r) {
  Vec least{};
  for (int64_t j = 0; j < s.n; j += kWidth)
    least = min(least, choose(s.at(j) > -INFINITY, s.at(j), least));
  r.cut = -largest(-least);
  r.sum = sum_of_exp(s, r.top, -INFINITY);
}

// The weights of kWidth scores of a row, and the factors of their gradients. All 0 where masked.
struct Parts {
  Vec w, slope, share, pull;
  Vec less{};  // Softpick: what W sums besides w
};

template <class W>
inline Parts parts(const W& w, Vec x, const RowThreshold& r) {
  const Slope<Vec> y = weight(w, x - r.top);
  const VecInt seen = x > -INFINITY;
  return {choose(seen, y.w, Vec{}), choose(seen, y.dw, Vec{}), Vec{}, Vec{}};
}
inline Parts parts(const StickBreaking&, Vec w, const RowThreshold&) {  // weights already
  return {w, Vec{}, Vec{}, Vec{}};
}
// y = e^(x - top) - e^-top, near 0 by e^x - 1 = 2 t / (1 - t) with t = tanh(x / 2), which does not
// cancel; `less` is also that of a hidden score.
inline Parts parts(const Softpick&, Vec x, const RowThreshold& r) {
  const Vec e = exp(x - r.top), one = exp(splat(-r.top)), t = tanh(0.5f * x), none{};
  const Vec y = choose(abs(x) < 1, one * (2 * t / (1 - t)), e - one);
  return {max(y, none), e, none, none, max(-y, none)};
}
// The gradient of y, where dp is that of w and dW that of |y|.
inline Vec d_weight(const Parts& p, Vec dp, Vec dW) {
  return choose(p.less > 0, -dW, dp + choose(p.w > 0, dW, Vec{}));
}
inline Parts parts(const Entmax& w, Vec x, const RowThreshold& r) {
  const float a = w.alpha - 1;
  const Vec z = max((x - r.top) * a - r.cut, Vec{}), p = power(z, a);
  const Vec slope = choose(z > 0, p / z, Vec{});  // p^(2 - alpha)
  return {p, slope, slope / r.sum, slope};
}
inline Parts parts(const TopK& w, Vec x, const RowThreshold& r) {
  const Vec p = exp(x - r.top) / r.sum, kept = choose(x >= r.cut, p, Vec{});
  return {kept, kept, w.renormalise ? kept : p, kept};
}
// Stick breaking, in log space: w_s = sigmoid(x_s) prod_{r > s} (1 - sigmoid(x_r)). A key that is
// hidden, with a score of -inf, leaves the stick as it is.
inline Vec moved_down(Vec x, int by) {  // lane l has that of l + by, or 0
  return __builtin_shuffle(x, Vec{}, lanes(by));
}
inline Vec moved_up(Vec x, int by) {
  return __builtin_shuffle(Vec{}, x, lanes(kWidth - by));
}

inline void break_sticks(const float* x, int64_t n, float* w) {
  constexpr double kGone = -200;  // e^-200 is 0
  double left = 0;                // log of the stick that later keys leave
  for (int64_t j = n - kWidth; j >= 0; j -= kWidth) {
    if (left < kGone) {
      store(w + j, Vec{});
      continue;
    }
    const Vec y = load(x + j), l = log1p(exp(-abs(y)));
    const Vec kept = -l - max(y, Vec{}), own = min(y, Vec{}) - l;  // logs of 1 - sigmoid, sigmoid
    Vec all = kept;
    for (int d = 1; d < kWidth; d *= 2) all += moved_down(all, d);
    store(w + j, exp(own + (moved_down(all, 1) + float(left))));
    left += all[0];
  }
}
// The score gradients of kWidth scores x, from dl = w dw; `before` is the sum of dl of earlier
// keys:
//   dx_s = dl_s (1 - sigmoid(x_s)) - sigmoid(x_s) sum_{r < s} dl_r
inline Vec d_stick(Vec x, Vec dl, double& before) {
  const Vec e = exp(-abs(x)), more = 1 / (1 + e), less = e * more;
  Vec all = dl;
  for (int d = 1; d < kWidth; d *= 2) all += moved_up(all, d);
  const Vec earlier = moved_up(all, 1) + float(before);
  before += all[kWidth - 1];
  return dl * choose(x > 0, less, more) - choose(x > 0, more, less) * earlier;
}

inline float range(const RowThreshold& r) {
  return greater(r.top, 0) - r.cut + 1e-10f;
}
inline Parts parts(const SelfAdjusted&, Vec x, const RowThreshold& r) {
  const Vec p = exp(x - r.top) / r.sum;
  const Vec place = choose(x > -INFINITY, (x - r.cut) / range(r), Vec{}), w = place * p;
  return {w, w, p, w};
}

}  // namespace horner::attn::kernels::HORNER_ISA

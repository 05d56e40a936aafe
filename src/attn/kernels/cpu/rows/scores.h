// Reductions over the scores of one query: the largest, the k-th largest, the sum of exponentials,
// and the sharpness.
#pragma once

#include <cfloat>
#include <cmath>

#include "attn/kernels/cpu/vectors.h"

namespace horner::attn::kernels::HORNER_ISA {

inline float greater(float a, float b) {
  return a > b ? a : b;
}

// The scores of one query, -inf where masked.
struct Scores {
  const float* x;
  int64_t n;     // a multiple of kTile
  float* spare;  // [n + kWidth]

  Vec at(int64_t j) const { return load(x + j); }
};

// The largest; NaN if any score is NaN or +inf.
inline float top(const Scores& s) {
  Vec most = splat(-INFINITY);
  VecInt fine = lanes(0) >= 0;
  for (int64_t j = 0; j < s.n; j += kWidth) {
    most = max(most, s.at(j));
    fine &= s.at(j) < splat(INFINITY);
  }
  for (int l = 0; l < kWidth; ++l)
    if (!fine[l]) return NAN;
  return largest(most);
}

inline float sum_of_exp(const Scores& s, float top, float least) {
  Vec total{};
  for (int64_t j = 0; j < s.n; j += kWidth)
    total += choose(s.at(j) >= least, exp(s.at(j) - top), Vec{});
  return sum(total);
}

// The adaptive temperature from the entropy H of the softmax of the row, as in the reference.
inline float sharpness(const Scores& s) {
  const float most = top(s), total = sum_of_exp(s, most, -INFINITY);
  if (!(total > 0)) return 1;
  Vec entropy{};
  for (int64_t j = 0; j < s.n; j += kWidth) {
    const Vec p = exp(s.at(j) - most) / total;
    entropy -= p * log(p + 1e-9f);
  }
  const double H = sum(entropy), beta = (((-0.037 * H + 0.481) * H - 2.3) * H + 4.917) * H - 1.791;
  return H > 0.5 && beta > 1 ? float(beta) : 1;
}

// The k-th largest score, -inf if there are fewer. Bisection: it lies between the scores low and
// high, and each step moves one of them past the middle.
inline float kth_largest(const Scores& s, int64_t k, float high) {
  float low = -INFINITY, middle = -FLT_MAX;
  while (low < high) {
    Vec above = splat(INFINITY), below = splat(-INFINITY);
    VecInt count{};
    for (int64_t j = 0; j < s.n; j += kWidth) {
      const Vec x = s.at(j);
      const VecInt over = x >= middle;
      count -= over;
      above = min(above, choose(over, x, above));
      below = max(below, choose(over, below, x));
    }
    int64_t n = 0;
    for (int l = 0; l < kWidth; ++l) n += count[l];
    if (n >= k)
      low = -largest(-above);
    else
      high = largest(below);
    if (n == k) break;
    middle = low / 2 + high / 2;
    if (!(middle > low)) middle = high;
  }
  return low;
}

}  // namespace horner::attn::kernels::HORNER_ISA

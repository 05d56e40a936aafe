// The weights of one score on single numbers, for host and device alike: a value and a derivative.
// F is a float, or on the CPU a vector of them (kernels/vec.h).
#pragma once

#include <cmath>

#include "attn/spec.h"

#ifdef __CUDACC__
#define HORNER_HD __host__ __device__ __forceinline__
#else
#define HORNER_HD inline __attribute__((always_inline))
#endif

namespace horner::attn {

template <class F>
struct Slope {
  F w, dw;
};

// The functions that the weights need of a number.
template <class F>
struct Maths;
template <>
struct Maths<float> {
  static HORNER_HD float exp(float x) { return expf(x); }
};

template <class F>
HORNER_HD Slope<F> weight(const Exp&, F x) {
  const F y = Maths<F>::exp(x);
  return {y, y};
}
template <class F>
HORNER_HD Slope<F> weight(const Sigmoid&, F x) {
  const F y = 1 / (1 + Maths<F>::exp(-x));
  return {y, y * (1 - y)};
}

// Taylor and Power, with their coefficients made once: sum_n c[n] (x / unit)^n. The unit, a power
// of two, keeps the coefficients of a long series inside the range of a float.
struct Polynomial {
  int degree;
  float per_unit;
  float c[171];
};
inline Polynomial polynomial(int first, int degree) {
  Polynomial p{degree, 1, {}};
  const double unit = degree <= 20 ? 1 : degree <= 80 ? 16 : 32;
  p.per_unit = float(1 / unit);
  double c = 1;
  for (int n = 0; n <= degree; c *= unit / ++n) p.c[n] = n < first ? 0 : float(c);
  return p;
}
inline Polynomial polynomial(Taylor w) {
  return polynomial(0, w.order);
}
inline Polynomial polynomial(Power w) {
  return polynomial(w.degree, w.degree);
}

// Horner; `degree` is p's, as an int or as a constant.
template <class F, class Degree>
HORNER_HD Slope<F> weight(const Polynomial& p, F x, Degree degree) {
  const F u = x * p.per_unit;
  Slope<F> y{0 * x + p.c[degree], 0 * x};
  for (int n = degree; n > 0; --n) y = {y.w * u + p.c[n - 1], y.dw * u + y.w};
  return {y.w, y.dw * p.per_unit};
}
template <class F>
HORNER_HD Slope<F> weight(const Polynomial& p, F x) {
  return weight(p, x, p.degree);
}

}  // namespace horner::attn

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
template <class R>
struct PolynomialOf {
  int degree;
  R per_unit;
  R c[171];
};
using Polynomial = PolynomialOf<float>;
template <class R = float>
PolynomialOf<R> polynomial(int first, int degree) {
  PolynomialOf<R> p{degree, 1, {}};
  const double unit = degree <= 20 ? 1 : degree <= 80 ? 16 : 32;
  p.per_unit = R(1 / unit);
  double c = 1;
  for (int n = 0; n <= degree; c *= unit / ++n) p.c[n] = n < first ? 0 : R(c);
  return p;
}
inline Polynomial polynomial(Taylor w) {
  return polynomial(0, w.order);
}
inline Polynomial polynomial(Power w) {
  return polynomial(w.degree, w.degree);
}

template <class R, class F>
HORNER_HD Slope<F> weight(const PolynomialOf<R>& p, F x) {  // Horner
  const F u = x * p.per_unit;
  Slope<F> y{0 * x + p.c[p.degree], 0 * x};
  for (int n = p.degree; n > 0; --n) y = {y.w * u + p.c[n - 1], y.dw * u + y.w};
  return {y.w, y.dw * p.per_unit};
}

}  // namespace horner::attn

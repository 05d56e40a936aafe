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
  bool is_series;  // of exp: c[n] = 1 / n!
};
using Polynomial = PolynomialOf<float>;
template <class R = float>
PolynomialOf<R> polynomial(int first, int degree) {
  PolynomialOf<R> p{degree, 1, {}, first == 0};
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

// The same where the degree is known, from 2 to 20, and so the unit is 1: nothing is left but the
// steps themselves.
template <int degree, class F>
HORNER_HD Slope<F> weight_of_degree(const Polynomial& p, F x) {
  const F first = x * p.c[degree] + p.c[degree - 1];
  Slope<F> y{first * x + p.c[degree - 2], x * p.c[degree] + first};
  for (int n = degree - 2; n > 0; --n) y = {y.w * x + p.c[n - 1], y.dw * x + y.w};
  return y;
}

template <int n, class F>
HORNER_HD F power(F x) {
  if constexpr (n == 1) return x;
  const F half = power<(n + 1) / 2>(x);
  if constexpr (n % 2 == 0) return half * half;
  return half * power<n / 2>(x);
}
// Likewise of a series, whose derivative is itself without its last term: e_n = e_{n-1} + x^n / n!
template <int degree, class F>
HORNER_HD Slope<F> series_of_degree(const Polynomial& p, F x) {
  F y = x * p.c[degree - 1] + p.c[degree - 2];
  for (int n = degree - 2; n > 0; --n) y = y * x + p.c[n - 1];
  return {power<degree>(x) * p.c[degree] + y, y};
}

}  // namespace horner::attn

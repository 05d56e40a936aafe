// The weights as kernels take them. A weight of one score is a value and a derivative, for host and
// device alike: F is a float, or on the CPU a vector (core/simd).
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

// The functions of a number that the weights use.
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

// Taylor and Power with their coefficients: sum_n c[n] (x / unit)^n. The unit, a power of two,
// keeps the coefficients of a long series within the range of a float.
template <class R>
struct PolynomialOf {
  int degree;
  R per_unit;
  R c[171];
  bool is_series;  // the series of exp: c[n] = 1 / n!
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

template <class R, class F>
HORNER_HD Slope<F> weight(const PolynomialOf<R>& p, F x) {  // Horner
  const F u = x * p.per_unit;
  Slope<F> y{F{} + p.c[p.degree], F{}};
  for (int n = p.degree; n > 0; --n) y = {y.w * u + p.c[n - 1], y.dw * u + y.w};
  return {y.w, y.dw * p.per_unit};
}

// The same for a degree known at compile time, from 2 to 20, so that the unit is 1.
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
// The same for a series, whose derivative is the series without its last term:
// e_n = e_{n-1} + x^n / n!
template <int degree, class F>
HORNER_HD Slope<F> series_of_degree(const Polynomial& p, F x) {
  F y = x * p.c[degree - 1] + p.c[degree - 2];
  for (int n = degree - 2; n > 0; --n) y = y * x + p.c[n - 1];
  return {power<degree>(x) * p.c[degree] + y, y};
}

// Whether no weight is below 0, whatever the score. A long series may be, by rounding.
HORNER_HD bool positive(const Exp&) {
  return true;
}
HORNER_HD bool positive(const Sigmoid&) {
  return true;
}
HORNER_HD bool positive(const Polynomial& p) {
  return p.degree % 2 == 0 && p.degree <= 10;
}

// Every weight in the form that kernels take: of one score, or of the whole row.
template <class R>
using OneScore = std::variant<Exp, Sigmoid, PolynomialOf<R>>;
using WholeRow = std::variant<Entmax, TopK, SelfAdjusted, Softpick, StickBreaking>;
template <class R>
using KernelWeight = std::variant<OneScore<R>, WholeRow>;
template <class... A, class... B>
std::variant<A..., B...> joined(std::variant<A...>, std::variant<B...>);  // for its type

template <class R>
struct ToKernelWeight {
  using To = KernelWeight<R>;
  To operator()(Exp w) const { return OneScore<R>(w); }
  To operator()(Taylor w) const { return OneScore<R>(polynomial<R>(0, w.order)); }
  To operator()(Power w) const { return OneScore<R>(polynomial<R>(w.degree, w.degree)); }
  To operator()(Sigmoid w) const { return OneScore<R>(w); }
  To operator()(Entmax w) const { return WholeRow(w); }
  To operator()(TopK w) const { return WholeRow(w); }
  To operator()(SelfAdjusted w) const { return WholeRow(w); }
  To operator()(Softpick w) const { return WholeRow(w); }
  To operator()(StickBreaking w) const { return WholeRow(w); }
};
template <class R>
KernelWeight<R> kernel_weight(const Weight& w) {
  return std::visit(ToKernelWeight<R>{}, w);
}
template <class R>
OneScore<R> one_score(const Weight& w) {  // throws for a weight of the whole row
  return std::get<OneScore<R>>(kernel_weight<R>(w));
}

}  // namespace horner::attn

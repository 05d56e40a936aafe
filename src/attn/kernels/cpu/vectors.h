// The vectors of core/simd in the namespace of the CPU kernels, and the functions that attn/math.h
// needs to evaluate weights on them.
#pragma once

#include "attn/math.h"
#include "core/simd/vec.h"

namespace horner::attn {

namespace kernels::HORNER_ISA {
using namespace simd::HORNER_ISA;

// tanh x within 3 ulps, also near 0: E / (E + 2) with E = e^2|x| - 1 = 2^n (e^r - 1) + 2^n - 1.
inline Vec tanh(Vec x) {
  const Vec t = min(splat(20), 2 * abs(x));  // from there on the result rounds to 1
  const Vec magic = splat(12582912.f);       // as in exp_down
  const Vec n = t * 1.44269504f + magic - magic;
  const Vec r = t - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = r * 1.3946437e-3f + 8.3665773e-3f;
  p = p * r + 4.1666280e-2f;
  p = p * r + 1.6666543e-1f;
  p = p * r + 0.5f;
  const VecInt bits = (__builtin_convertvector(n, VecInt) + 127) << 23;
  const Vec power = reinterpret_cast<Vec>(bits), less = p * (r * r) + r;
  const Vec E = power * less + (power - 1), y = E / (E + 2);
  const VecInt sign = reinterpret_cast<VecInt>(x) & int32_t(0x80000000);
  return reinterpret_cast<Vec>(reinterpret_cast<VecInt>(y) | sign);
}

// log(1 + e) for 0 <= e <= 1, within 2 ulps: 2 atanh z with z = e / (2 + e).
inline Vec log1p(Vec e) {
  const Vec z = e / (2 + e), u = z * z;
  Vec p = u * 2.8024465e-1f + 2.7999139e-1f;
  p = p * u + 4.0021700e-1f;
  p = p * u + 6.6666412e-1f;
  return 2 * z + p * u * z;
}

}  // namespace kernels::HORNER_ISA

template <>
struct Maths<simd::HORNER_ISA::Vec> {
  using Vec = simd::HORNER_ISA::Vec;
  static HORNER_HD Vec exp(Vec x) { return simd::HORNER_ISA::exp(x); }
  static HORNER_HD Vec tanh(Vec x) { return kernels::HORNER_ISA::tanh(x); }
};
template <>
struct Maths<simd::HORNER_ISA::VecDouble> {
  using Vec = simd::HORNER_ISA::VecDouble;
  static HORNER_HD Vec exp(Vec x) {
    for (int i = 0; i < simd::HORNER_ISA::kLanes<double>; ++i) x[i] = ::exp(x[i]);
    return x;
  }
  static HORNER_HD Vec tanh(Vec x) {
    for (int i = 0; i < simd::HORNER_ISA::kLanes<double>; ++i) x[i] = ::tanh(x[i]);
    return x;
  }
};

}  // namespace horner::attn

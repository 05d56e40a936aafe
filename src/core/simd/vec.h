// Vectors of floats in the widest registers of the target instruction set: AVX-512, AVX2 or 128
// bits. They are the compiler's vector types, with intrinsics where those have no equivalent.
// Everything is in a namespace named after the set (HORNER_ISA): of several inline functions with
// the same name, the linker would keep only one.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cstdint>

namespace horner::simd::HORNER_ISA {

#if defined(__AVX512F__)
inline constexpr int kWidth = 16;
#elif defined(__AVX2__)
inline constexpr int kWidth = 8;
#else
inline constexpr int kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t VecInt __attribute__((vector_size(kWidth * 4)));
typedef Vec VecLoose __attribute__((aligned(4), may_alias));
typedef float FloatLoose __attribute__((may_alias));

inline Vec load(const float* p) {
  return *reinterpret_cast<const VecLoose*>(p);
}
inline void store(float* p, Vec x) {
  *reinterpret_cast<VecLoose*>(p) = x;
}
inline Vec splat(float x) {
  return x - Vec{};
}
inline Vec splat(int x) {
  return splat(float(x));
}

// The same for double, for sums that cancel.
typedef double VecDouble __attribute__((vector_size(kWidth * 4)));
typedef VecDouble VecDoubleLoose __attribute__((aligned(8), may_alias));
inline VecDouble load(const double* p) {
  return *reinterpret_cast<const VecDoubleLoose*>(p);
}
inline void store(double* p, VecDouble x) {
  *reinterpret_cast<VecDoubleLoose*>(p) = x;
}
inline VecDouble splat(double x) {
  return x - VecDouble{};
}
template <class R>
inline constexpr int kLanes = kWidth * 4 / int(sizeof(R));
template <class R>
using VecOf = decltype(load(static_cast<const R*>(nullptr)));

inline VecInt lanes(int from) {  // from, from + 1, ...
  VecInt v;
  for (int i = 0; i < kWidth; ++i) v[i] = from + i;
  return v;
}
inline Vec choose(VecInt mask, Vec yes, Vec no) {
  return mask ? yes : no;
}
// If either argument is NaN, the result is b.
inline Vec min(Vec a, Vec b) {
  return a < b ? a : b;
}
inline Vec max(Vec a, Vec b) {
  return a > b ? a : b;
}
// Reduces all lanes with f, in halves.
template <class F>
inline float fold(Vec x, const F& f) {
  for (int n = kWidth / 2; n > 0; n /= 2) x = f(x, __builtin_shuffle(x, lanes(0) ^ n));
  return x[0];
}
inline float sum(Vec x) {
  return fold(x, [](Vec a, Vec b) { return a + b; });
}
inline float largest(Vec x) {
  return fold(x, [](Vec a, Vec b) { return max(a, b); });
}

// Transposes a kWidth x kWidth matrix.
template <int Step = kWidth / 2>
inline void transpose(Vec (&r)[kWidth]) {
  const VecInt l = lanes(0), odd = (l & Step) != 0;
  const VecInt left = odd ? l - Step + kWidth : l, right = odd ? l + kWidth : l + Step;
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if (i & Step) continue;
    const Vec a = r[i], b = r[i + Step];
    r[i] = __builtin_shuffle(a, b, left);
    r[i + Step] = __builtin_shuffle(a, b, right);
  }
  if constexpr (Step > 1) transpose<Step / 2>(r);
}

// Reduces each of kWidth vectors with f: lane i of the result belongs to vector i.
template <class F>
inline Vec fold_each(Vec (&r)[kWidth], const F& f) {
  transpose(r);
#pragma GCC unroll 4
  for (int n = kWidth / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) r[i] = f(r[i], r[i + n]);
  return r[0];
}
inline Vec sum_each(Vec (&r)[kWidth]) {
  return fold_each(r, [](Vec a, Vec b) { return a + b; });
}
inline Vec largest_each(Vec (&r)[kWidth]) {
  return fold_each(r, [](Vec a, Vec b) { return max(a, b); });
}

// e^x within 1 ulp, for x <= 88.7 or NaN; 0 below -87.3: x = n log 2 + r with |r| <= log 2 / 2, and
// e^r by a polynomial of degree 6, times 2^n. The result of a NaN is one, whatever its bits.
inline Vec exp_down(Vec x) {
  const Vec bottom = splat(-87.33654f);
  const Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
#ifndef __AVX512F__
  const VecInt below = x < bottom;
  x = max(bottom, x);
#endif
  const Vec n = x * 1.44269504f + magic - magic;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = r * 1.3814593295e-3f + 8.3687177377e-3f;
  p = p * r + 4.1668388181e-2f;
  p = p * r + 1.6666520623e-1f;
  p = p * r + 4.9999993447e-1f;
  p = p * (r * r) + r + 1.f;
#ifdef __AVX512F__
  const __mmask16 inside = _mm512_cmp_ps_mask((__m512)x, (__m512)bottom, _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(inside, (__m512)p, (__m512)n);
#else
  const VecInt bits = reinterpret_cast<VecInt>(p) + (__builtin_convertvector(n, VecInt) << 23);
  return choose(below, Vec{}, reinterpret_cast<Vec>(bits));
#endif
}
// For any x; inf above 88.7.
inline Vec exp(Vec x) {
  const Vec top = splat(88.72283f);
  return choose(x > top, splat(__builtin_inff()), exp_down(min(top, x)));
}

inline Vec abs(Vec x) {
  return reinterpret_cast<Vec>(reinterpret_cast<VecInt>(x) & 0x7fffffff);
}
// x = 2^exponent * mantissa for x > 0, with the mantissa in [1, 2).
#ifdef __AVX512F__
inline Vec exponent(Vec x) {
  return (Vec)_mm512_getexp_ps((__m512)x);
}
inline Vec mantissa(Vec x) {
  return (Vec)_mm512_getmant_ps((__m512)x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
}
#else
inline Vec exponent(Vec x) {
  return __builtin_convertvector((reinterpret_cast<VecInt>(x) - 0x3f800000) >> 23, Vec);
}
inline Vec mantissa(Vec x) {
  return reinterpret_cast<Vec>((reinterpret_cast<VecInt>(x) & 0x007fffff) | 0x3f800000);
}
#endif

// log x for normal x > 0 (-88 for 0): x = 2^e m with 1/2 <= m^2 < 2, log m by a fitted series.
inline Vec log(Vec x) {
  const VecInt bits = reinterpret_cast<VecInt>(x);
  const VecInt e = (bits - 0x3f3504f3) >> 23;
  const Vec f = reinterpret_cast<Vec>(bits - (e << 23)) - 1.f, n = __builtin_convertvector(e, Vec);
  constexpr float kSeries[] = {-1.1514610310e-1f, 1.1676998740e-1f,  -1.2420140846e-1f,
                               1.4249322787e-1f,  -1.6668057665e-1f, 2.0000714765e-1f,
                               -2.4999993993e-1f, 3.3333331174e-1f};
  Vec p = splat(7.0376836292e-2f);
  for (float c : kSeries) p = p * f + c;
  return n * 0.693359375f + (f + (p * f * f * f - n * 2.12194440e-4f - f * f * 0.5f));
}

}  // namespace horner::simd::HORNER_ISA

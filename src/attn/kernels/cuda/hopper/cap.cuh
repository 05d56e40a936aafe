// A soft cap of the scores of exp on Hopper: c tanh(scale q.k / c). Its kernels turn products into
// tanh first; the scores are these times c, which is the `scale` of the problem that they get.
#pragma once

#include <algorithm>

#include "attn/kernels/cuda/hopper/decay.cuh"

namespace horner::attn::kernels::cuda {

// Whether tanh of small scores is a polynomial, on the units of multiplications and additions, or
// always an instruction of the special function unit, which exp also takes.
inline constexpr bool kCapPolynomialForward = true, kCapPolynomialBackward = true;

// A weight of capped scores, with separate kernels.
template <class W>
struct WithCap {
  W of;
  float in;                   // scale / c
  float most;                 // products up to this take the polynomial,
  float first, third, fifth;  // whose coefficients these are
};
template <class W>
inline constexpr bool kHasCap = false;
template <class W>
inline constexpr bool kHasCap<WithCap<W>> = true;

// Whether these products also bound the scores so that weights need no shift: by 12, since sums
// below kTinySum count as 0. float16 has no such range.
template <class T>
inline constexpr bool kCapIsBounded = std::is_same_v<T, bf16>;

// The polynomial is for |x| up to 0.3 of tanh x, where its relative error is 1.2e-6 (minimax).
template <class T, class W>
WithCap<W> with_cap(const W& w, const Fused& f) {
  const float in = f.scale / f.softcap,
              u = kCapIsBounded<T> ? std::min(0.3f, 12 / f.softcap) : 0.3f;
  const float third = in * in * in;
  return {w, in, u / in, 0.99999884f * in, -0.33310022f * third, 0.12633946f * third * in * in};
}

template <class W>
HORNER_HD const W& base_weight(const WithCap<W>& w) {
  return w.of;
}
template <class W, class F>
HORNER_HD void with_degree(const WithCap<W>& w, int degree, const F& f) {
  with_degree(w.of, degree, f);
}

// From products to tanh, in place. Returns whether all of the warp took the polynomial.
template <class T, bool polynomial, class W, int columns>
__device__ __forceinline__ bool cap(const WithCap<W>& w, float (&x)[columns][4]) {
  if constexpr (polynomial) {
    float top[4] = {};
#pragma unroll
    for (int j = 0; j < 4 * columns; ++j) top[j % 4] = fmaxf(top[j % 4], fabsf(x[j / 4][j % 4]));
    if (__all_sync(~0u, fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])) <= w.most)) {
#pragma unroll
      for (int j = 0; j < 4 * columns; ++j) {
        float& y = x[j / 4][j % 4];
        const float square = y * y;
        y *= (w.fifth * square + w.third) * square + w.first;
      }
      return true;
    }
  }
#pragma unroll
  for (int j = 0; j < 4 * columns; ++j) x[j / 4][j % 4] = tanh_of<T>(x[j / 4][j % 4] * w.in);
  return false;
}

}  // namespace horner::attn::kernels::cuda

// A soft cap of the scores of exp on Hopper: c tanh(x / c) in place of x, before anything else.
#pragma once

#include "attn/kernels/cuda/hopper/decay.cuh"

namespace horner::attn::kernels::cuda {

// A weight of capped scores, with separate kernels.
template <class W>
struct WithCap {
  W of;
};
template <class W>
inline constexpr bool kHasCap = false;
template <class W>
inline constexpr bool kHasCap<WithCap<W>> = true;

template <class W>
HORNER_HD const W& base_weight(const WithCap<W>& w) {
  return w.of;
}
template <class W, class F>
HORNER_HD void with_degree(const WithCap<W>& w, int degree, const F& f) {
  with_degree(w.of, degree, f);
}
template <class W, class F>
HORNER_HD void with_slopes(const WithCap<W>& w, const F& f) {
  with_slopes(w.of, f);
}

// In units of q.k.
template <class T, int columns>
__device__ __forceinline__ void cap(const Fused& f, float (&x)[columns][4]) {
  const float in = __fdividef(f.scale, f.softcap), out = __fdividef(f.softcap, f.scale);
#pragma unroll
  for (int j = 0; j < 4 * columns; ++j) x[j / 4][j % 4] = tanh_of<T>(x[j / 4][j % 4] * in) * out;
}

// The slope of the cap at weights times a: their logs, and what was subtracted from the exponents
// of each query, are the scores.
__device__ __forceinline__ void cap_slopes(const Fused& f, const float* subtracted,
                                           const float (&x)[8][4], float (&dx)[8][4]) {
  const float per = __fdividef(1, f.softcap * kLog2e);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 sub = *reinterpret_cast<const float2*>(subtracted + 8 * j + lane() % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float z = (__log2f(fabsf(x[j][i])) + (i % 2 ? sub.y : sub.x)) * per;
      dx[j][i] *= 1 - fminf(z * z, 1);  // a weight of 0 has none
    }
  }
}

}  // namespace horner::attn::kernels::cuda

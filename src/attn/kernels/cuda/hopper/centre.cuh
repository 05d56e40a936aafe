// Centred scores on Hopper: centre_t / scale is subtracted from the products q.k before anything
// else. The gradient of a centre is -sum_s dx_ts: a product of dx, which is in shared memory for
// dq, with ones.
#pragma once

#include "attn/kernels/cuda/hopper/cap.cuh"
#include "attn/kernels/cuda/hopper/decay.cuh"
#include "attn/kernels/cuda/hopper/wgmma.cuh"

namespace horner::attn::kernels::cuda {

// A weight of scores less a centre, which may be a constant, with separate kernels.
template <class W>
struct WithCentre {
  W of;
};
template <class W>
inline constexpr bool kHasCentre = false;
template <class W>
inline constexpr bool kHasCentre<WithCentre<W>> = true;

template <class W>
HORNER_HD const W& base_weight(const WithCentre<W>& w) {
  return w.of;
}

HORNER_HD int degree_of(const WithCentre<Polynomial>& w) {
  return degree_of(w.of);
}
HORNER_HD int slope_degree_of(const WithCentre<Polynomial>& w) {
  return slope_degree_of(w.of);
}
template <class W, class F>
HORNER_HD void with_degree(const WithCentre<W>& w, int degree, const F& f) {
  with_degree(w.of, degree, f);
}

// Centres of a thread's two rows, forward. Removes them from the running sums.
template <bool has_centre>
struct RowCentres {
  __device__ RowCentres(const Fused&, float (&)[2]) {}
  template <int columns>
  __device__ void subtract(float (&)[columns][4]) const {}
};
template <>
struct RowCentres<true> {
  float of[2];

  __device__ RowCentres(const Fused& f, float (&centre)[2])
      : of{centre[0] / f.scale, centre[1] / f.scale} {
    centre[0] = centre[1] = 0;
  }
  template <int columns>
  __device__ __forceinline__ void subtract(float (&x)[columns][4]) const {
#pragma unroll
    for (int i = 0; i < 4 * columns; ++i) x[i / 4][i % 4] -= of[i % 4 / 2];
  }
};

// Centres of a lane's two queries, backward.
template <bool has_centre>
struct QueryCentres {
  __device__ void load(const Fused&, const Head&, int, int) {}
};
template <>
struct QueryCentres<true> {
  float of[2];

  __device__ void load(const Fused& f, const Head& head, int i, int t) {
    of[i] = t < f.T ? f.centre[head.row(f, t)] : 0;
  }
};

// Whether backward sums dx over keys: its negative is the gradient of a centre, and it is a query's
// part of the gradient of a decay in the scores, if that has one.
template <class W>
inline constexpr bool kSumsDx = kHasCentre<W> || kDecayInScores<W>;
template <class W>
__device__ inline bool sums_dx(const Fused& f) {
  return kHasCentre<W> || (kDecayInScores<W> && f.d_decay_key);
}
// Issues the sums of a tile's dx over four steps of 16 keys or queries, its A operands.
template <class T, Major X, class A>
__device__ __forceinline__ void begin_sums(float (&sum)[1][4], const A& dx, uint32_t ones) {
  wgmma_ss<T, false, X, Major::k>(sum, dx(0), ones_desc(ones));
#pragma unroll
  for (int s = 1; s < 4; ++s) wgmma_ss<T, true, X, Major::k>(sum, dx(s), ones_desc(ones));
}
// Adds the sums of a thread's two rows, equal in all columns, to global memory: of four lanes, one
// adds the first and one the second.
template <class W>
__device__ __forceinline__ void add_sums(const Fused& f, int b, int h, int t0,
                                         const float (&sum)[4]) {
  const int of_four = lane() % 4, t = t0 + warp() % 4 * 16 + lane() / 4 + 8 * of_four;
  float* const to = kHasCentre<W> ? f.d_centre : static_cast<float*>(f.d_decay_query);
  const float y = of_four ? sum[2] : sum[0];
  if (to && of_four < 2 && t < f.T)
    atomicAdd(to + (int64_t(b) * f.H + h) * f.T + t, kHasCentre<W> ? -y : y);
}

}  // namespace horner::attn::kernels::cuda

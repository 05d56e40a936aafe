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

// Issues the sums of a tile's dx over `steps` steps of 16 keys from `step` on.
template <class T, int steps, int R, int C>
__device__ __forceinline__ void begin_centres(float (&sum)[1][4], SwizzledTile<R, C> dx, int step,
                                              uint64_t ones) {
  wgmma_ss<T, false, Major::mn, Major::k>(sum, dx.mn_major(0, step), ones);
#pragma unroll
  for (int s = 1; s < steps; ++s)
    wgmma_ss<T, true, Major::mn, Major::k>(sum, dx.mn_major(0, step + s), ones);
}
// Adds the sums of a thread's two rows, equal in all columns, to global memory: of four lanes, one
// adds the first and one the second.
__device__ __forceinline__ void add_centre_gradients(const Fused& f, int b, int h, int t0,
                                                     const float (&sum)[4]) {
  const int of_four = lane() % 4, t = t0 + warp() % 4 * 16 + lane() / 4 + 8 * of_four;
  if (f.d_centre && of_four < 2 && t < f.T)
    atomicAdd(f.d_centre + (int64_t(b) * f.H + h) * f.T + t, -(of_four ? sum[2] : sum[0]));
}

}  // namespace horner::attn::kernels::cuda

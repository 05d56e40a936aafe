// The stages between q.k and the weight that only some variants have: soft cap, bias and clamp, and
// for exp the decay. Scores stay in units of q.k, so that what follows is the same as without them.
#pragma once

#include "attn/kernels/cuda/common/tiles.cuh"

namespace horner::attn::kernels::cuda {

struct ChangedScore {
  float x;      // in units of q.k
  float slope;  // of the soft cap
  bool live;    // below the clamp
};
template <class T>
__device__ __forceinline__ ChangedScore changed_score(const Fused& f, float x, float bias,
                                                      float centre) {
  float slope = 1;
  const float per = __frcp_rn(f.scale), most = (f.clamp + centre) * per;
  if (f.softcap != 0) {
    const float z = tanh_of<T>(__fdividef(x * f.scale, f.softcap));
    x = f.softcap * z * per, slope = 1 - z * z;
  }
  x = fmaf(bias, per, x);  // one rounding of what may be a large score
  return {min_nan(x, most), slope, x < most};
}

// x plus the log of a decay in units of ln 2, times `per`.
__device__ inline float with_log2_decay(float x, float log_decay, float per) {
  return log_decay < kNoLog2DecayLeft ? -INFINITY : x + log_decay * per;
}

// The place of the bias of query t and key s, in arrays of these strides.
__device__ inline int64_t bias_at(const Fused& f, const Head& head, int t, int s, int64_t batch,
                                  int64_t of_head) {
  return head.b * batch + head.h * of_head + int64_t(min(t, f.T - 1)) * f.S + min(s, f.S - 1);
}
__device__ inline float bias_of(const Fused& f, const Head& head, int t, int s) {
  return f.bias ? f.bias[bias_at(f, head, t, s, f.bias_batch, f.bias_head)] : 0;
}
__device__ inline void add_bias_gradient(const Fused& f, const Head& head, int t, int s, float dx) {
  if (t < f.T && s < f.S && dx != 0)
    atomicAdd(f.d_bias + bias_at(f, head, t, s, f.d_bias_batch, f.d_bias_head), dx);
}
__device__ inline float centre_of(const Fused& f, const Head& head, int t) {
  return f.centre ? f.centre[head.row(f, min(t, f.T - 1))] : 0;
}

}  // namespace horner::attn::kernels::cuda

// The mean scores of queries on a GPU, and their gradients (kernels/cuda/prepare/centre.h).
#pragma once

#include "attn/exec/cuda.h"

namespace horner::attn::exec {

// The inputs of a centre other than q and k, which are from laid_out.
struct CentreOf {
  SeenKeys keys;
  at::Tensor count;  // [B, T] float32 with a `keep`: the number of keys kept
  float scale = 1;
};

at::Tensor centre(const CentreOf&, const at::Tensor& q, const at::Tensor& k);  // [B, H, T], float32

// Adds the gradients that flow through the centre to dq and dk, which are contiguous. Where
// `dq_sum` (float32) is defined, dq becomes that plus the addition.
void add_centre_gradients(const CentreOf&, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& d_centre, const at::Tensor& dq_sum,
                          const at::Tensor& dq, const at::Tensor& dk);

}  // namespace horner::attn::exec

// The mean scores of queries on a GPU, and their gradients (kernels/centre_cuda.h).
#pragma once

#include "attn/exec/cuda.h"

namespace horner::attn::exec {

// What a centre needs beside q and k, which are laid out.
struct CentreOf {
  SeenKeys keys;
  at::Tensor count;  // [B, T] float32 where there is a `keep`: the keys that it leaves
  float scale = 1;
};

at::Tensor centre(const CentreOf&, const at::Tensor& q, const at::Tensor& k);  // [B, H, T], float32

// Adds the gradients by way of the centre, whose own is given, to dq and dk, which are contiguous;
// where `dq_sum` is defined (float32) dq is that and what is added to it.
void add_centre_gradients(const CentreOf&, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& d_centre, const at::Tensor& dq_sum,
                          const at::Tensor& dq, const at::Tensor& dk);

}  // namespace horner::attn::exec

// The mean scores of queries on a GPU, with gradients (kernels/centre_cuda.h).
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

}  // namespace horner::attn::exec

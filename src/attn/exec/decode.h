// Single tokens of a stream on the decode kernels, on the CPU or a GPU.
#pragma once

#include "attn/make_state.h"
#include "attn/stages.h"

namespace horner::attn::exec {

// N, W and shift of one query per head, whose key is already among the recent ones. q: mapped;
// factor: of the products, one number in host memory or one of each row; centre: [B, H, 1], or
// undefined.
Sums apply_state(const State&, const Inputs&, const at::Tensor& q, const at::Tensor& factor,
                 const at::Tensor& centre);

// Adds the first n recent keys to the sums.
void fold(const State&, int64_t n);

}  // namespace horner::attn::exec

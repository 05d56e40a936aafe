// The gradients of sums over keys whose rows need nothing else: those of near keys, and of a ring.
#pragma once

#include <ATen/core/Tensor.h>

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::exec {

// dk and dv by the kernels of fused_cuda, and dq, which is returned: [B, H, T, D], in float32 where
// rows are summed by atomic additions. With those the gradients of the decays of queries and of
// keys are sums of the same numbers.
at::Tensor fused_gradients(kernels::cuda::Fused&, const kernels::cuda::Weights&,
                           const at::Tensor& q);

}  // namespace horner::attn::exec

// One pass of the kernels of fused_cuda, forward and backward, for executions that add several of
// them before the denominator: near keys beside far ones, and the blocks of keys of a ring.
#pragma once

#include <ATen/core/Tensor.h>

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::exec {

// The result of a pass, with the sum of its weights and what that is relative to. Sets the pointers
// of `f` to them.
struct FusedSums {
  at::Tensor o, rows;  // [B, H, T, E], [3, B, H, T]

  FusedSums(kernels::cuda::Fused& f, const kernels::cuda::Weights&, const at::TensorOptions&);
  at::Tensor W() const { return rows[0]; }
  at::Tensor shift() const { return rows[1]; }
};

// Memory where atomic additions sum dq, in rows of `channels`, not cleared. Undefined where
// algorithms must be deterministic.
at::Tensor dq_sums(kernels::cuda::Fused&, const at::Tensor& q, int channels);

// Computes dk and dv, to which `f` points, and returns dq: [B, H, T, D], in float32 where atomic
// additions sum its rows. The gradients of the decays of queries and of keys are then sums of the
// same numbers.
at::Tensor fused_gradients(kernels::cuda::Fused&, const kernels::cuda::Weights&,
                           const at::Tensor& q);

}  // namespace horner::attn::exec

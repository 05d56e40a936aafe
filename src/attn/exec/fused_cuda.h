// One pass over tiles of keys, on an NVIDIA GPU: what fused_cuda and hopper_cuda share.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "attn/attend.h"
#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::exec {

// What differs between architectures: the kernels, and how they lay out memory.
struct TileKernels {
  using Fused = kernels::cuda::Fused;
  using Launch = void (*)(const Fused&, const kernels::cuda::Weights&, kernels::cuda::Stream);

  std::string_view execution;
  Launch forward;
  Launch keys;                                // dk and dv, and dq_sum
  at::Tensor (*laid_out)(const at::Tensor&);  // q, k, v and the gradient of the result
  int (*dq_channels)(const Fused&);           // of a row of dq_sum
  bool (*owns_keys)(const Fused&);            // no two thread blocks of `keys` read the same keys
};

at::Tensor attend_in_tiles(const TileKernels&, const Spec&, const Inputs&, Statistics*);
double work_in_tiles_on_gpu(const Spec&, const Inputs&);
c10::SymInt kept_in_tiles(const Spec&, const Inputs&);  // Execution::kept

// What both executions require: "" when that is met.
std::string why_not_in_tiles(const Spec&, const Inputs&);

// float16 has too few bits for queries multiplied by a scale per row, for near keys beside others,
// for sticks, for corrected values, and for the gradient of a norm whose row can vanish or is
// divided by another sum.
bool needs_float32(const Spec&);

}  // namespace horner::attn::exec

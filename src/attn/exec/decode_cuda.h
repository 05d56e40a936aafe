// The decode kernels on torch's stream; cuda_stub.cpp stands in where torch has no CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "attn/kernels/cpu/decode/decode.h"
#include "attn/plan.h"

namespace horner::attn::exec {

// "" when the GPU kernels decode a stream of this shape.
std::string why_not_on_gpu(const StateShape&);

// `like` is a tensor on the GPU that runs them.
void apply_state_on_gpu(const kernels::Decode<float>&, const at::Tensor& like);
void fold_on_gpu(const kernels::Decode<float>&, const at::Tensor& like);

}  // namespace horner::attn::exec

// The kernels of decode_cuda.h on torch's stream; a stub where torch has no CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "attn/kernels/cpu/decode/decode.h"
#include "attn/plan.h"

namespace horner::attn::exec {

// "" when a stream of this shape is decoded by kernels on a GPU.
std::string why_not_on_gpu(const StateShape&);

// `like` lies on the GPU.
void ask_on_gpu(const kernels::Decode<float>&, const at::Tensor& like);
void fold_on_gpu(const kernels::Decode<float>&, const at::Tensor& like);

}  // namespace horner::attn::exec

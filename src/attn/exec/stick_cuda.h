// Stick breaking on an NVIDIA GPU, a part of fused_cuda with kernels of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "attn/attend.h"

namespace horner::attn::exec {

at::Tensor attend_sticks_on_gpu(const Spec&, const Inputs&, Statistics*);
std::string why_no_sticks(const Spec&);  // "" when the kernels have its other stages

}  // namespace horner::attn::exec

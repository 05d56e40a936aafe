// Near keys on an NVIDIA GPU, a part of fused_cuda: exp over the window and the variant's weight
// over the keys before it are two passes of the same kernels, whose sums are added.
#pragma once

#include <ATen/core/Tensor.h>

#include "attn/attend.h"

namespace horner::attn::exec {

at::Tensor attend_near_on_gpu(const Spec&, const Inputs&, Statistics*);

}  // namespace horner::attn::exec

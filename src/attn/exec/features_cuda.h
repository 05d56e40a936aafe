// A stage before the CUDA kernels, by a kernel of its own (kernels/features_cuda.h) instead of
// tensor code. It keeps nothing for backward but what it was given.
#pragma once

#include <ATen/core/Tensor.h>

#include "attn/attend.h"

namespace horner::attn::exec {

// `mapped` of stages.h of an x on a GPU, times a factor of the row [1 or B, 1 or H, 1 or T, 1]
// unless that is undefined, in the dtype of x. Where a kernel made it, it is contiguous and its
// channels are padded with zeros.
at::Tensor mapped_on_gpu(const Features&, const at::Tensor& x, const at::Tensor& projection,
                         int64_t repeats = 1, const at::Tensor& factor = {});

}  // namespace horner::attn::exec

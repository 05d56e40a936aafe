// The feature map before the CUDA kernels, by a kernel (kernels/cuda/prepare/features.h) instead of
// tensor code. It saves only its inputs for backward.
#pragma once

#include <ATen/core/Tensor.h>

#include "attn/attend.h"

namespace horner::attn::exec {

// `mapped` of stages.h for an x on a GPU, times a factor per row [1 or B, 1 or H, 1 or T, 1] unless
// that is undefined, in the dtype of x. If a kernel computes it, the result is contiguous and its
// channels are padded with zeros.
at::Tensor mapped_on_gpu(const Features&, const at::Tensor& x, const at::Tensor& projection,
                         int64_t repeats = 1, const at::Tensor& factor = {});

}  // namespace horner::attn::exec

// The stream on which CUDA kernels are launched. Only where torch has CUDA.
#pragma once

#include <c10/cuda/CUDAStream.h>

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::exec {

inline kernels::cuda::Stream stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

}  // namespace horner::attn::exec

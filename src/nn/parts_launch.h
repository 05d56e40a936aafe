// Which kernels of the parts run for a tensor: one table for the CPU, one for CUDA.
#pragma once

#include <ATen/core/Tensor.h>

#include "nn/kernels/parts.h"

namespace horner::nn::parts {

struct Launch {
  void (*norm)(const kernels::Norm&);
  void (*norm_backward)(const kernels::Norm&);
  void (*heads)(const kernels::Heads&);
  void (*heads_backward)(const kernels::Heads&);
  void (*gated)(const kernels::Gated&);
  void (*gated_backward)(const kernels::Gated&);
  void (*loss)(const kernels::Loss&);
};
const Launch& cpu_launch();
const Launch* cuda_launch();  // null where torch has no CUDA, or the kernels were not compiled

}  // namespace horner::nn::parts

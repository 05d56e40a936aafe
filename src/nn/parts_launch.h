// The kernels of the parts: one table for the CPU, one for CUDA.
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
const Launch* cuda_launch();  // null if built without CUDA

}  // namespace horner::nn::parts

// Activation recomputation: a part of the graph that keeps only its inputs and runs again in the
// backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace horner::attn {

using Tensors = std::vector<at::Tensor>;

// run(inputs), which may also read `parameters`. Those are leaves; some tensors may be undefined.
Tensors recomputed(const std::function<Tensors(const Tensors& inputs)>& run, const Tensors& inputs,
                   const Tensors& parameters);

}  // namespace horner::attn

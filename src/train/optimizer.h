// AdamW with torch's fused kernels; no step waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "nn/slots.h"
#include "train/settings.h"

namespace horner::train {

struct Parameter {
  std::string name;  // unique
  at::Tensor at;     // float32, a leaf that requires a gradient
  at::Tensor mean, square;
  int64_t layer;  // -1: outside the layers
};

struct Optimizer {
  std::vector<Parameter> parameters;  // in the order of nn::slots, without constants
  at::Tensor count;                   // [], steps taken
};

// Makes the model's tensors float32 on `device`, and all but constants leaves that require
// gradients.
Optimizer make_optimizer(nn::Model&, at::Device);

// Scalar inputs and outputs of a step, at fixed addresses so that the step can be captured.
struct StepNumbers {
  at::Tensor rate;    // [], the learning rate
  at::Tensor limits;  // [2], a loss or gradient norm above these skips the update
  at::Tensor loss;    // []
  at::Tensor norm;    // [], norm of all gradients
  at::Tensor norms;   // [parameters], norm of each gradient
};
StepNumbers step_numbers(const Optimizer&);

void clear_gradients(Optimizer&);

// Writes the gradient norms to `numbers`; clips and applies the update unless a limit is exceeded.
void update(Optimizer&, const Settings&, StepNumbers& numbers);

}  // namespace horner::train

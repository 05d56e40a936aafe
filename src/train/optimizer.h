// AdamW on the parameters of a model, by torch's fused kernels; no step waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "nn/model.h"
#include "train/settings.h"

namespace horner::train {

struct Parameter {
  std::string name;  // no two have the same
  at::Tensor at;     // float32, a leaf that takes gradients
  at::Tensor mean, square;
  int64_t layer;  // -1: of no layer
};

struct Optimizer {
  std::vector<Parameter> parameters;  // in the order of nn::slots
  at::Tensor count;                   // [], steps taken
};

// Makes the model's tensors float32 leaves on `device` that take gradients.
Optimizer make_optimizer(nn::Model&, at::Device);

// What a step takes and gives besides; tensors that stay where they are, so that it can be
// captured.
struct StepNumbers {
  at::Tensor rate;    // [], the learning rate
  at::Tensor limits;  // [2], a loss or a gradient beyond these leaves everything as it is
  at::Tensor loss;    // []
  at::Tensor norm;    // [], the length of all gradients
  at::Tensor norms;   // [parameters], of each
};
StepNumbers step_numbers(const Optimizer&);

void clear_gradients(Optimizer&);

// The gradients' lengths into `numbers`, and a step along them, clipped, unless a limit forbids it.
void update(Optimizer&, const Settings&, StepNumbers& numbers);

}  // namespace horner::train

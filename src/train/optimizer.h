// AdamW with torch's fused kernels; no step waits for the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "nn/slots.h"
#include "train/settings.h"
#include "train/shards.h"

namespace horner::train {

struct Parameter {
  std::string name;  // unique
  at::Tensor at;     // float32, a leaf that requires a gradient
  int64_t layer;     // -1: outside the layers
};

// What this process updates of a parameter: all of it, or a run of its elements.
struct Piece {
  size_t of;            // index of the parameter
  int64_t begin;        // its first element
  at::Tensor x;         // a view of the parameter
  at::Tensor gradient;  // undefined: the parameter's
  at::Tensor mean, square;
};

struct Optimizer {
  std::vector<Parameter> parameters;  // in the order of nn::slots, without constants
  std::vector<Piece> pieces;
  at::Tensor count;  // [], steps taken
};

// Makes the model's tensors float32 on `device`, and all but constants leaves that require
// gradients. This process updates all of them, or the parts of `shards`, which it makes of them.
Optimizer make_optimizer(nn::Model&, at::Device);
Optimizer make_optimizer(nn::Model&, at::Device, const Group&, const Sharding&,
                         std::unique_ptr<Shards>& shards);

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
// `group`: the ranks that hold the other pieces.
void update(Optimizer&, const Settings&, StepNumbers& numbers, const Group& group = Group());

}  // namespace horner::train

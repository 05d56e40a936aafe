// The tensors of a model by name: shapes, and the values with which training starts.
#pragma once

#include "nn/model.h"

namespace horner::nn {

// The distribution of initial values: the number `a`; normal with standard deviation `a`; uniform
// from `a` to `b`; or a + b i for element i.
struct Start {
  enum Kind { constant, normal, uniform, index } kind = constant;
  double a = 0, b = 0;
  double (*map)(double) = nullptr;  // applied to each value
};

// A tensor by its Hugging Face name, with its shape. Slots of the same name are stored as one
// tensor, their rows below each other.
struct Slot {
  std::string name;
  at::Tensor* at;
  std::vector<int64_t> shape;
  Start start;
  bool transposed = false;         // stored [in, out]
  bool fixed = false;              // a constant: not trained
  int part = 0;                    // how many slots of the same name precede it
  int64_t first = 0;               // the rows of those slots
  std::vector<int64_t> rows = {};  // where its rows are stored; empty: from `first` on

  std::string unique_name() const;
};
std::vector<Slot> slots(Model&);

bool is_of_variant(const Slot&);  // a weight of the layer's attention variant

// The initial value of a weight, in float32: a function of the seed, the slot's unique name and its
// shape. Models that share a tensor therefore begin with the same values, whatever else they have.
at::Tensor random_start(const Slot&, uint64_t seed);

// Random weights as in Hugging Face's code: normal, with config.json's initializer_range; with
// "horner": {"init": "torch"} in it, layers start as torch's modules: uniform in ±1/√(inputs).
Model random_model(const ModelConfig&, uint64_t seed);

int64_t parameter_count(const Model&);

}  // namespace horner::nn

// AdamW over some tensors of a model, with a file from which it resumes.
#pragma once

#include "convert/settings.h"
#include "train/optimizer.h"

namespace horner::convert {

struct Tuned {
  std::string name;
  at::Tensor at;  // a leaf in float32
};

// Weights of the variants of converted heads, as leaves that learn. Replaces them in the model.
std::vector<Tuned> own_weights(nn::Model&);

class Tuner {
 public:
  // Continues from `file` where it exists: the tensors take its values.
  Tuner(std::vector<Tuned>, int64_t steps, double rate, std::filesystem::path file);

  int64_t step() const { return step_; }
  bool done() const { return step_ >= settings_.steps; }
  // After backward: one update, and gradients are cleared. Returns `loss`, which is also kept.
  double update(const at::Tensor& loss);
  void save() const;
  const std::vector<double>& losses() const { return losses_; }

 private:
  train::Settings settings_;
  train::Optimizer optimizer_;
  train::StepNumbers numbers_;
  std::filesystem::path file_;
  int64_t step_ = 0;
  std::vector<double> losses_;
};

// Steps until the tuner is done; saves now and then, and before it throws Stopped.
void tune(Tuner&, const Hooks&, const std::string& what,
          const std::function<at::Tensor(int64_t step)>& backward);

}  // namespace horner::convert

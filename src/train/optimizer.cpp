#include "train/optimizer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace horner::train {

static int64_t layer_of(const std::string& name) {
  for (const char* before : {".layers.", ".h."}) {
    const size_t at = name.find(before);
    if (at != std::string::npos) return std::stoll(name.substr(at + std::string(before).size()));
  }
  return -1;
}

Optimizer make_optimizer(nn::Model& m, at::Device device) {
  const c10::NoGradGuard without_gradients;
  Optimizer out;
  for (const nn::Slot& s : nn::slots(m)) {
    at::Tensor x = at::empty(s.at->sizes(), at::TensorOptions(device).dtype(at::kFloat));
    x.copy_(*s.at);
    *s.at = x;
    if (s.fixed) continue;
    x.set_requires_grad(true);
    out.parameters.push_back(
        {s.unique_name(), x, at::zeros_like(x), at::zeros_like(x), layer_of(s.name)});
  }
  if (m.config.tied) m.head = m.embedding;
  out.count = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  return out;
}

StepNumbers step_numbers(const Optimizer& o) {
  const auto zeros = [&](at::IntArrayRef shape) { return at::zeros(shape, o.count.options()); };
  return {zeros({}), zeros({2}), zeros({}), zeros({}), zeros({int64_t(o.parameters.size())})};
}

void clear_gradients(Optimizer& o) {
  for (Parameter& p : o.parameters) p.at.mutable_grad() = at::Tensor();
}

void update(Optimizer& o, const Settings& s, StepNumbers& n) {
  const c10::NoGradGuard without_gradients;
  std::vector<at::Tensor> all;
  for (Parameter& p : o.parameters) {
    // A variant may leave a parameter without a gradient; its norm is 0.
    if (!p.at.grad().defined()) p.at.mutable_grad() = at::zeros_like(p.at);
    all.push_back(p.at.grad());
  }
  n.norms.copy_(at::stack(at::_foreach_norm(all)));
  n.norm.copy_(n.norms.norm());
  const at::Tensor fine =
      n.loss.le(n.limits[0]).logical_and(n.norm.le(n.limits[1])).to(at::kFloat);  // false for NaN
  o.count.add_(fine);
  // The kernels divide gradients by `divisor`, and do nothing if `skip` is 1.
  const at::Tensor divisor = s.clip > 0 ? (n.norm / s.clip).clamp_min(1) : at::ones_like(n.norm);
  const at::Tensor skip = 1 - fine;
  for (const bool decayed : {true, false}) {
    std::vector<at::Tensor> x, g, mean, square, count;
    for (const Parameter& p : o.parameters) {
      if ((s.decay_all || p.at.dim() >= 2) != decayed) continue;
      x.push_back(p.at), g.push_back(p.at.grad());
      mean.push_back(p.mean), square.push_back(p.square), count.push_back(o.count);
    }
    if (x.empty()) continue;
    at::_fused_adamw_(x, g, mean, square, {}, count, n.rate, s.beta1, s.beta2,
                      decayed ? s.weight_decay : 0, s.eps, /*amsgrad=*/false, /*maximize=*/false,
                      divisor, skip);
  }
}

}  // namespace horner::train

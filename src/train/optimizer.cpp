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

static Optimizer without_pieces(nn::Model& m, at::Device device) {
  const c10::NoGradGuard without_gradients;
  Optimizer out;
  for (const nn::Slot& s : nn::slots(m)) {
    at::Tensor x = at::empty(s.at->sizes(), at::TensorOptions(device).dtype(at::kFloat));
    x.copy_(*s.at);
    *s.at = x;
    if (s.fixed) continue;
    x.set_requires_grad(true);
    out.parameters.push_back({s.unique_name(), x, layer_of(s.name)});
  }
  if (m.config.tied) m.head = m.embedding;
  out.count = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  return out;
}

Optimizer make_optimizer(nn::Model& m, at::Device device) {
  Optimizer out = without_pieces(m, device);
  for (size_t i = 0; i < out.parameters.size(); ++i) {
    const at::Tensor x = out.parameters[i].at.detach();
    out.pieces.push_back({i, 0, x, {}, at::zeros_like(x), at::zeros_like(x)});
  }
  return out;
}

Optimizer make_optimizer(nn::Model& m, at::Device device, const Group& group, const Sharding& s,
                         std::unique_ptr<Shards>& shards) {
  Optimizer out = without_pieces(m, device);
  std::vector<at::Tensor> all;
  for (const Parameter& p : out.parameters) all.push_back(p.at);
  shards = std::make_unique<Shards>(group, all, s);
  for (const Shards::Part& part : shards->parts())
    out.pieces.push_back({part.parameter, part.begin, part.weights, part.gradient,
                          at::zeros_like(part.weights), at::zeros_like(part.weights)});
  return out;
}

StepNumbers step_numbers(const Optimizer& o) {
  const auto zeros = [&](at::IntArrayRef shape) { return at::zeros(shape, o.count.options()); };
  return {zeros({}), zeros({2}), zeros({}), zeros({}), zeros({int64_t(o.parameters.size())})};
}

void clear_gradients(Optimizer& o) {
  for (Parameter& p : o.parameters) p.at.mutable_grad() = at::Tensor();
}

// The gradient of each piece.
static std::vector<at::Tensor> gradients(Optimizer& o) {
  std::vector<at::Tensor> out;
  for (const Piece& piece : o.pieces) {
    const at::Tensor& p = o.parameters[piece.of].at;
    // A variant may leave a parameter without a gradient; its norm is 0.
    if (!piece.gradient.defined() && !p.grad().defined()) p.mutable_grad() = at::zeros_like(p);
    out.push_back(piece.gradient.defined() ? piece.gradient : p.grad());
  }
  return out;
}

// The norm of each parameter's gradient, of which other ranks hold the other pieces.
static at::Tensor norms_over(const Group& group, const Optimizer& o,
                             const std::vector<at::Tensor>& gradients) {
  const at::Tensor squares =
      at::zeros({int64_t(o.parameters.size())}, o.count.options().dtype(at::kDouble));
  if (!gradients.empty()) {
    std::vector<int64_t> of;
    for (const Piece& piece : o.pieces) of.push_back(int64_t(piece.of));
    squares.index_add_(0, at::tensor(of, squares.options().dtype(at::kLong)),
                       at::stack(at::_foreach_norm(gradients)).to(at::kDouble).square());
  }
  group.sum(squares);
  return squares.sqrt();
}

void update(Optimizer& o, const Settings& s, StepNumbers& n, const Group& group) {
  const c10::NoGradGuard without_gradients;
  const std::vector<at::Tensor> all = gradients(o);
  n.norms.copy_(group.link() ? norms_over(group, o, all) : at::stack(at::_foreach_norm(all)));
  n.norm.copy_(n.norms.norm());
  const at::Tensor fine =
      n.loss.le(n.limits[0]).logical_and(n.norm.le(n.limits[1])).to(at::kFloat);  // false for NaN
  o.count.add_(fine);
  // The kernels divide gradients by `divisor`, and do nothing if `skip` is 1.
  const at::Tensor divisor = s.clip > 0 ? (n.norm / s.clip).clamp_min(1) : at::ones_like(n.norm);
  const at::Tensor skip = 1 - fine;
  for (const bool decayed : {true, false}) {
    std::vector<at::Tensor> x, g, mean, square, count;
    for (size_t i = 0; i < o.pieces.size(); ++i) {
      const Piece& p = o.pieces[i];
      if ((s.decay_all || o.parameters[p.of].at.dim() >= 2) != decayed) continue;
      x.push_back(p.x), g.push_back(all[i]);
      mean.push_back(p.mean), square.push_back(p.square), count.push_back(o.count);
    }
    if (x.empty()) continue;
    at::_fused_adamw_(x, g, mean, square, {}, count, n.rate, s.beta1, s.beta2,
                      decayed ? s.weight_decay : 0, s.eps, /*amsgrad=*/false, /*maximize=*/false,
                      divisor, skip);
  }
}

}  // namespace horner::train

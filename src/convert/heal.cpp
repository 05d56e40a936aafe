#include "convert/heal.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "core/random.h"
#include "nn/slots.h"

namespace horner::convert {

namespace {

// W + B A of a projection; B starts at 0.
struct LowRank {
  size_t layer;
  at::Tensor nn::Layer::* at;
  at::Tensor base, A, B;

  at::Tensor sum() const { return (base.to(at::kFloat) + at::matmul(B, A)).to(base.scalar_type()); }
};

// A [rank, in] with entries of variance 1 / in, the same for every conversion of a teacher.
at::Tensor start_of(const std::string& name, at::IntArrayRef shape, uint64_t seed,
                    at::Device device) {
  const nn::Slot slot{
      name, nullptr, shape.vec(), {nn::Start::normal, 1 / std::sqrt(double(shape[1]))}};
  return nn::random_start(slot, seed).to(device).set_requires_grad(true);
}

std::vector<LowRank> low_ranks(const nn::Model& m, int64_t rank, uint64_t seed,
                               std::vector<Tuned>& all) {
  static constexpr std::pair<const char*, at::Tensor nn::Layer::*> kWhich[] = {
      {"q", &nn::Layer::q}, {"k", &nn::Layer::k}, {"v", &nn::Layer::v}, {"o", &nn::Layer::o}};
  std::vector<LowRank> out;
  for (size_t i = 0; i < m.layers.size(); ++i)
    for (const auto& [name, at] : kWhich) {
      const at::Tensor W = (m.layers[i].*at).detach();
      if (!W.defined()) continue;
      const std::string full = "layers." + std::to_string(i) + "." + name;
      LowRank x{
          i, at, W, start_of(full + ".A", {rank, W.size(1)}, seed, W.device()),
          at::zeros({W.size(0), rank}, W.options().dtype(at::kFloat)).set_requires_grad(true)};
      all.push_back({full + ".A", x.A}), all.push_back({full + ".B", x.B});
      out.push_back(x);
    }
  return out;
}

void make_all_learn(nn::Model& m, std::vector<Tuned>& all) {
  for (const nn::Slot& s : nn::slots(m)) {
    if (nn::is_of_variant(s) || s.fixed) continue;
    *s.at = s.at->detach().to(at::kFloat).clone().set_requires_grad(true);
    all.push_back({s.unique_name(), *s.at});
  }
  if (m.config.tied) m.head = m.embedding;
}

}  // namespace

std::vector<double> heal(const Task& t, nn::Model& m, int64_t steps,
                         const std::filesystem::path& file, const std::string& what) {
  if (steps == 0) return {};
  std::vector<Tuned> all = own_weights(m);
  std::vector<LowRank> changed;
  if (t.s.rank > 0)
    changed = low_ranks(m, t.s.rank, t.s.seed, all);
  else
    make_all_learn(m, all);
  Tuner tuner(all, steps, t.s.heal_rate, file);
  const auto merged = [&] {
    nn::Model out = m;
    for (const LowRank& x : changed) out.layers[x.layer].*x.at = x.sum();
    return out;
  };
  // Sequences that the transfer has not seen, the same for every conversion.
  const uint64_t first = uint64_t(1) << 32;
  tune(tuner, t.hooks, what, [&](int64_t step) {
    const at::Tensor tokens =
        t.sequences(first + uint64_t(step * t.s.batch), t.s.batch, t.s.length);
    const int64_t n = t.s.length - 1;
    const auto rows = [&](const at::Tensor& x) {
      return x.narrow(1, 0, n).reshape({-1, x.size(2)});
    };
    const at::Tensor targets = tokens.narrow(1, 1, n).reshape({-1});
    at::Tensor own;
    if (t.s.distil > 0) {
      const c10::NoGradGuard none;
      own = rows(nn::hidden(t.teacher, tokens, t.run));
    }
    const c10::AutoGradMode learns(true);
    const nn::Model now = merged();
    const at::Tensor x = rows(nn::hidden(now, tokens, t.run));
    const at::Tensor loss = t.s.distil > 0
                                ? nn::distillation(now, x, t.teacher, own, targets, t.s.distil)
                                : nn::cross_entropy(now, x, targets);
    loss.backward();
    return loss.detach();
  });
  const c10::NoGradGuard none;
  m = merged();
  for (const nn::Slot& s : nn::slots(m)) *s.at = s.at->detach();
  if (m.config.tied) m.head = m.embedding;
  return tuner.losses();
}

}  // namespace horner::convert

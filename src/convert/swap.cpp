#include "convert/swap.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace horner::convert {

at::Tensor hidden_with(const nn::Model& m, const at::Tensor& tokens, std::span<const Swap> swaps,
                       const nn::Run& run) {
  const c10::NoGradGuard none;
  at::Tensor rows;
  nn::Probe probe;
  probe.input = [&](int64_t, const at::Tensor& x) { rows = x; };
  probe.attention = [&](const nn::Operated& o) {
    for (const Swap& swap : swaps) {
      std::vector<int64_t> here;
      for (const auto& [layer, head] : swap.heads)
        if (layer == o.layer) here.push_back(head);
      if (here.empty()) continue;
      const at::Tensor index = at::tensor(here, at::kLong).to(o.result.device());
      const at::Tensor other =
          swap.with ? nn::heads_of_layer(*swap.with, size_t(o.layer), rows, o.in)
                    : o.result.mean(at::IntArrayRef({0, 2}), true).expand_as(o.result);
      const at::Tensor chosen = other.index_select(1, index).to(o.result.scalar_type());
      at::Tensor(o.result).index_copy_(1, index, chosen);
    }
  };
  nn::Run watched = run;
  watched.probe = &probe;
  return nn::hidden(m, tokens, watched);
}

Effect effect_of(const nn::Model& m, const at::Tensor& tokens, const at::Tensor& hidden,
                 const at::Tensor& own, int64_t from) {
  const c10::NoGradGuard none;
  const int64_t n = tokens.size(1) - 1 - from;
  const auto rows = [&](const at::Tensor& x) {
    return x.narrow(1, from, n).reshape({-1, x.size(2)});
  };
  const at::Tensor targets = tokens.narrow(1, from + 1, n).reshape({-1});
  Effect out{nn::cross_entropy(m, rows(hidden), targets).item<double>()};
  if (own.defined())
    out.kl = nn::distillation(m, rows(hidden), m, rows(own), targets, 1).item<double>();
  return out;
}

}  // namespace horner::convert

#include "attn/plan.h"

#include <cmath>

namespace horner::attn {

static double choose(double n, int k) {
  double c = 1;
  for (int i = 1; i <= k; ++i) c = c * (n - k + i) / i;
  return std::round(c);
}

struct FeatureCount {
  double D;

  double operator()(Power w) const { return choose(D + w.degree - 1, w.degree); }
  double operator()(Taylor w) const { return choose(D + w.order, w.order); }
  template <class W>
  double operator()(W) const {
    return INFINITY;
  }
};

double feature_count(const Spec& spec, int64_t D) {
  if (!why_no_state(spec).empty()) return INFINITY;
  const auto* projected = std::get_if<Project>(&spec.features);
  return std::visit(FeatureCount{double(projected ? projected->dim : D)}, spec.weight);
}

double state_bytes(const Spec& spec, int64_t D, int64_t E) {
  return feature_count(spec, D) * double(E + 1) * sizeof(float);
}

std::string why_no_state(const Spec& spec) {
  if (spec.clamp != kNoClamp) return "a clamped score has no finite state";
  if (std::isinf(std::visit(FeatureCount{1}, spec.weight))) return "its weight has no finite state";
  if (is<Adaptive>(spec.sharpness)) return "its temperature needs the whole row";
  if (!is<Causal>(spec.mask)) return "only a causal mask has a running state";
  return "";
}

}  // namespace horner::attn

#include "attn/plan.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace horner::attn {

static double choose(double n, int k) {
  double c = 1;
  for (int i = 1; i <= k; ++i) c = c * (n - k + i) / i;
  return std::round(c);
}

struct OrdersOf {
  Orders operator()(Power w) const { return {w.degree, w.degree}; }
  Orders operator()(Taylor w) const { return {0, w.order}; }
  template <class W>
  Orders operator()(W) const {
    return {0, 0};
  }
};
Orders orders(const Weight& w) {
  return std::visit(OrdersOf{}, w);
}

int64_t mapped_channels(const Spec& spec, int64_t D) {
  const auto* projected = std::get_if<Project>(&spec.features);
  return projected ? projected->dim : D;
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
  return std::visit(FeatureCount{double(mapped_channels(spec, D))}, spec.weight);
}

bool sums_in_double(const Spec& spec) {
  constexpr int kHighestInFloat = 3;
  return orders(spec.weight).last > kHighestInFloat;
}

double state_bytes(const Spec& spec, int64_t D, int64_t E) {
  return feature_count(spec, D) * double(E + 1) * (sums_in_double(spec) ? 8 : 4);
}

std::string why_too_large(const Spec& spec, const StateShape& s) {
  constexpr int64_t kPadded = 16;  // channels, as the kernels have them
  const int64_t E = (s.E + kPadded - 1) / kPadded * kPadded;
  const double bytes = state_bytes(spec, s.D, E) * double(s.B * s.G);
  if (bytes <= kMostStateBytes) return "";
  std::ostringstream out;
  out.precision(3);
  out << "its state would take " << bytes / 1e9 << " GB (" << feature_count(spec, s.D)
      << " features for each of " << s.B * s.G << " heads); at most " << kMostStateBytes / 1e9
      << " GB are given to one";
  return out.str();
}

// The same with one order less.
static Spec lowered(Spec spec) {
  spec.weight = Taylor{std::max(0, orders(spec.weight).last - 1)};
  return spec;
}

// Per token: (C + 16) / 2 keys of D + E channels inside a chunk, and F * E numbers twice through
// the state, for which a pass costs as much as kPass more tokens would.
int chunk_length(const Spec& spec, int64_t D, int64_t E) {
  constexpr double kPass = 16;
  const double state = 4 * feature_count(spec, D) * double(E), inside = double(D + E);
  const double best = std::sqrt(state * kPass / inside);
  // All but the highest order of a chunk's features are held at once: in the cache.
  constexpr double kCached = 1 << 17;
  const double lower = feature_count(lowered(spec), D);
  return int(std::clamp(std::round(std::min(best, kCached / lower) / 16) * 16, 16.0, 256.0));
}

std::string why_no_state(const Spec& spec) {
  if (spec.clamp != kNoClamp) return "a clamped score has no finite state";
  if (std::isinf(std::visit(FeatureCount{1}, spec.weight))) return "its weight has no finite state";
  if (is<Adaptive>(spec.sharpness)) return "its temperature needs the whole row";
  if (!is<Causal>(spec.mask)) return "only a causal mask has a running state";
  return "";
}

double work_in_tiles(const Spec& spec, int64_t T, int64_t S, int64_t D, int64_t E) {
  double keys = double(S);  // that a query sees, on average
  if (is<Causal>(spec.mask)) keys = double(S) - double(T - 1) / 2;
  if (const auto* w = std::get_if<Window>(&spec.mask)) keys = std::min<double>(keys, w->size);
  return double(T) * std::max(keys, 1.0) * double(mapped_channels(spec, D) + E);
}

double work_in_chunks(const Spec& spec, int64_t S, int64_t D, int64_t E) {
  const int C = chunk_length(spec, D, E);
  const double inside =
      (std::min<double>(C, double(S)) + 16) / 2 * double(mapped_channels(spec, D) + E);
  const double state = S <= C ? 0 : 2 * feature_count(spec, D) * double(E + 1);
  return double(S) * (inside + state) * (sums_in_double(spec) ? 2 : 1);
}

double work_by_token(const Spec& spec, int64_t S, int64_t D, int64_t E) {
  return double(S) * 2 * feature_count(spec, D) * double(E + 1) * (sums_in_double(spec) ? 2 : 1);
}

double decode_crossover(const Spec& spec, int64_t D, int64_t E) {
  return state_bytes(spec, D, E) / double(sizeof(float) * size_t(mapped_channels(spec, D) + E));
}

}  // namespace horner::attn

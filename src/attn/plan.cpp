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

struct MappedChannels {
  int64_t D;

  int64_t operator()(Identity) const { return D; }
  int64_t operator()(Elu1) const { return D; }
  int64_t operator()(Relu) const { return D; }
  int64_t operator()(Cosine) const { return D; }
  int64_t operator()(Project f) const { return f.dim; }
  int64_t operator()(Hedgehog f) const { return 2 * f.dim; }
};
int64_t mapped_channels(const Spec& spec, int64_t D) {
  return std::visit(MappedChannels{D}, spec.features);
}

struct SharpnessSource {
  SharpnessFrom operator()(Flat) const { return SharpnessFrom::nothing; }
  SharpnessFrom operator()(LogLength) const { return SharpnessFrom::count; }
  SharpnessFrom operator()(LogPower) const { return SharpnessFrom::count; }
  SharpnessFrom operator()(Adaptive) const { return SharpnessFrom::entropy; }
};
SharpnessFrom sharpness_from(const Sharpness& s) {
  return std::visit(SharpnessSource{}, s);
}

bool needs_the_row(const Spec& spec) {
  const bool mean_of_others = spec.centred && (spec.softcap != 0 || spec.bias);
  return !facts(spec.weight).of_one_score || mean_of_others ||
         sharpness_from(spec.sharpness) > SharpnessFrom::count;
}

bool may_be_negative(const Spec& spec) {
  const bool positive_scores =
      (is<Elu1>(spec.features) || is<Relu>(spec.features) || is<Hedgehog>(spec.features)) &&
      !spec.centred && !spec.less_log_count && !spec.bias;
  return facts(spec.weight).negative && !positive_scores;
}

std::string why_no_state(const Spec& spec) {
  if (spec.clamp != kNoClamp) return "clamped scores have no finite state";
  if (spec.softcap != 0) return "capped scores have no finite state";
  if (spec.dropout != 0) return "dropout of single pairs has no finite state";
  if (spec.bias) return "a bias of each score has no finite state";
  if (!facts(spec.weight).orders) return "its weight has no finite state";
  if (spec.centred && facts(spec.weight).orders->first > 0)
    return "a power of centred scores requires sums of the lower powers, which its state does not "
           "hold";
  if (needs_the_row(spec)) return "its temperature depends on the whole row";
  if (sees_future(spec.mask) || !sees_all_past(spec.mask))
    return "only a causal mask has a running state";
  return "";
}

double feature_count(const Spec& spec, int64_t D) {
  if (!why_no_state(spec).empty()) return INFINITY;
  const Orders o = facts(spec.weight).orders.value();
  const auto n = double(mapped_channels(spec, D));
  if (o.first == 0) return choose(n + o.last, o.last);
  double sum = 0;
  for (int p = o.first; p <= o.last; ++p) sum += choose(n + p - 1, p);
  return sum;
}

bool sums_in_double(const Spec& spec) {
  constexpr int kHighestInFloat = 3;
  const auto orders = facts(spec.weight).orders;
  const bool cancels = spec.centred || is<ChannelGate>(spec.decay);
  return orders && (cancels || orders->last > kHighestInFloat);
}

double state_bytes(const Spec& spec, int64_t D, int64_t E) {
  return feature_count(spec, D) * double(E + 1) * (sums_in_double(spec) ? 8 : 4);
}

std::string why_too_large(const Spec& spec, const StateShape& s) {
  constexpr int64_t kPadded = 16;  // the kernels' multiple of channels
  const int64_t E = (s.E + kPadded - 1) / kPadded * kPadded;
  const double bytes = state_bytes(spec, s.D, E) * double(s.B * s.G);
  if (bytes <= kMostStateBytes) return "";
  std::ostringstream out;
  out.precision(3);
  out << "its state would take " << bytes / 1e9 << " GB (" << feature_count(spec, s.D)
      << " features for each of " << s.B * s.G << " heads); the limit is " << kMostStateBytes / 1e9
      << " GB";
  return out.str();
}

// Work per token: (C + 16) / 2 keys of D + E channels inside a chunk, and two passes over the F * E
// numbers of the state, each of which costs as much as kPass more tokens.
int chunk_length(const Spec& spec, int64_t D, int64_t E) {
  if (is<ChannelGate>(spec.decay)) return 16;  // keys decay token by token inside a chunk
  constexpr double kPass = 16;
  const double state = 4 * feature_count(spec, D) * double(E), inside = double(D + E);
  const double best = std::sqrt(state * kPass / inside);
  // All but the highest order of a chunk's features are held at once and have to fit in the cache.
  constexpr double kCached = 1 << 17;
  Spec lower = spec;
  lower.weight = Taylor{std::max(0, facts(spec.weight).orders.value().last - 1)};
  const double held = feature_count(lower, D);
  return int(std::clamp(std::round(std::min(best, kCached / held) / 16) * 16, 16.0, 256.0));
}

double seen_pairs(const Mask& mask, int64_t T, int64_t S) {
  const auto [back, ahead, chunk, first, prefix] = reach(mask);
  if (chunk > 0) return double(std::min(T, S)) * double(std::min<int64_t>(chunk, S)) / 2;
  if (ahead == 0) T = std::min(T, S);  // queries before the first key see nothing
  // Pairs beyond the end of a band: the integral of max(0, x) up to z.
  const auto triangle = [](double z) { return z > 0 ? z * z / 2 : 0; };
  const double past = triangle(double(S - back)) - triangle(double(S - T - back));
  const double each = double(T) * double(S) - triangle(double(T - ahead)) - past;
  return each + double(T) * std::min<double>(first, double(std::max<int64_t>(0, S - back)));
}

double work_in_tiles(const Spec& spec, int64_t T, int64_t S, int64_t D, int64_t E) {
  const double pairs = std::max(seen_pairs(spec.mask, T, S) + double(T) / 2, double(T));
  const double passes = is<Delta>(spec.values) ? 3 : 1;  // the values take rows of keys
  return pairs * double(mapped_channels(spec, D) + E) * passes;
}

double work_in_chunks(const Spec& spec, int64_t S, int64_t D, int64_t E) {
  const int C = chunk_length(spec, D, E);
  const double inside =
      (std::min<double>(C, double(S)) + 16) / 2 * double(mapped_channels(spec, D) + E);
  const double state = S <= C ? 0 : 2 * feature_count(spec, D) * double(E + 1);
  const double passes = is<Delta>(spec.values) ? 2 : 1;  // the values are sums of their own
  return double(S) * (inside + state) * passes * (sums_in_double(spec) ? 2 : 1);
}

double work_by_token(const Spec& spec, int64_t S, int64_t D, int64_t E) {
  return double(S) * 2 * feature_count(spec, D) * double(E + 1) * (sums_in_double(spec) ? 2 : 1);
}

double decode_crossover(const Spec& spec, int64_t D, int64_t E) {
  return state_bytes(spec, D, E) / double(sizeof(float) * size_t(mapped_channels(spec, D) + E));
}

}  // namespace horner::attn

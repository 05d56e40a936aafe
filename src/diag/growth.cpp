#include "diag/growth.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace horner::diag {

int64_t top_of(double fraction, int64_t n) {
  return std::clamp<int64_t>(std::llround(fraction * double(n)), 1, n - 1);
}

void add_row(Growth& g, const std::vector<int64_t>& lengths, int64_t t, int64_t n, int64_t N,
             double distance, double expected) {
  if (n < 8 || !(distance > 0) || !(expected > 0)) return;
  const double x = std::log(double(n)), each = distance / double(n - N);
  g.distance.add(x, std::log(distance)), g.each.add(x, std::log(each));
  g.expected.add(x, std::log(expected));
  for (size_t l = 0; l < lengths.size(); ++l) {
    if (t >= lengths[l] || t < lengths[l] / 2) continue;
    GrowthSums& s = g.lengths[l];
    ++s.rows, s.n += double(n), s.distance += distance, s.each += each, s.expected += expected;
  }
}

std::vector<nn::Query> growth_queries(const std::vector<int64_t>& lengths) {
  constexpr int64_t kEach = 16;
  std::set<int64_t> all;
  for (const int64_t L : lengths) {
    const int64_t from = L / 2, size = L - from, count = std::min(kEach, size);
    for (int64_t i = 0; i < count; ++i)
      if (const int64_t t = from + (2 * i + 1) * size / (2 * count); t >= 1) all.insert(t);
  }
  std::vector<nn::Query> out;
  for (const int64_t t : all) out.push_back({t, 1});
  return out;
}

const char* verdict(const Interval& slope, size_t heads) {
  if (std::isnan(slope.middle)) return "rows too short";
  if (heads < kLeastHeads) return "too few heads";
  return slope.low > 0 ? "grows" : slope.high < 0 ? "falls" : "undecided";
}

}  // namespace horner::diag

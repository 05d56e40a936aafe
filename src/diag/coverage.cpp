#include "diag/coverage.h"

#include <cmath>
#include <numeric>

namespace horner::diag {

double at_least_one(double p, double m) {
  return 1 - std::pow(1 - p, m);
}

static double sum(const std::vector<double>& v) {
  return std::accumulate(v.begin(), v.end(), 0.);
}
double Coverage::share() const {
  return separated / of;
}
double Coverage::measured() const {
  return sum(covered) / sum(selected);
}
double Coverage::expected() const {
  double all = 0;
  for (size_t m = 0; m < selected.size(); ++m)
    all += selected[m] * at_least_one(share(), double(m + 1));
  return all / sum(selected);
}
double Coverage::paper() const {
  return at_least_one(share(), double(heads()));
}

void add_row(Coverage& c, std::span<const std::span<const int32_t>> of_heads, double weight,
             std::vector<int32_t>& count, std::vector<uint8_t>& hit) {
  const auto place = [](int32_t token) { return size_t(token < 0 ? ~token : token); };
  for (const auto& tokens : of_heads)
    for (const int32_t token : tokens) {
      const bool separable = token >= 0;
      ++count[place(token)];
      hit[place(token)] |= separable;
      c.separated += separable ? weight : 0, c.of += weight;
    }
  for (const auto& tokens : of_heads)
    for (const int32_t token : tokens) {
      const size_t i = place(token);
      if (count[i] == 0) continue;  // already seen in another head
      const size_t m = size_t(count[i] - 1);
      c.selected[m] += weight, c.covered[m] += hit[i] ? weight : 0;
      count[i] = 0, hit[i] = 0;
    }
}

}  // namespace horner::diag

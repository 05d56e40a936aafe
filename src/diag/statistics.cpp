#include "diag/statistics.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "core/check.h"

namespace horner::diag {

void Line::add(double px, double py, double w) {
  n += w, x += w * px, y += w * py, xx += w * px * px, xy += w * px * py, yy += w * py * py;
}
double Line::slope() const {
  const double spread = n * xx - x * x;
  return spread > 1e-12 * n * xx ? (n * xy - x * y) / spread : NAN;
}
double Line::offset() const {
  return (y - slope() * x) / n;
}
double Line::r2() const {
  const double spread = n * yy - y * y;
  return spread > 0 ? slope() * (n * xy - x * y) / spread : NAN;
}

double quantile(std::vector<double> sample, double p) {
  std::erase_if(sample, [](double v) { return !std::isfinite(v); });
  if (sample.empty()) return NAN;
  std::sort(sample.begin(), sample.end());
  const double at = p * double(sample.size() - 1);
  const size_t low = size_t(at), high = std::min(low + 1, sample.size() - 1);
  return sample[low] + (at - double(low)) * (sample[high] - sample[low]);
}

Interval bootstrap_median(std::vector<double> sample, uint64_t seed) {
  std::erase_if(sample, [](double v) { return !std::isfinite(v); });
  if (sample.empty()) return {NAN, NAN, NAN};
  std::mt19937_64 random(seed);
  std::vector<double> medians, drawn(sample.size());
  for (int i = 0; i < 2000; ++i) {
    for (double& x : drawn) x = sample[random() % sample.size()];
    medians.push_back(quantile(drawn, 0.5));
  }
  return {quantile(sample, 0.5), quantile(medians, 0.025), quantile(medians, 0.975)};
}

// 1 - P(every point (i, j) of a random path has |i / n - j / m| < D). The share of paths to (i, j)
// that stay inside is a weighted mean of the shares of its two predecessors: nothing overflows.
static double p_value(size_t n, size_t m, double D) {
  const double most = D - 1e-9;  // D is a multiple of 1 / (n m)
  const auto inside = [&](size_t i, size_t j) {
    return std::abs(double(i) / double(n) - double(j) / double(m)) < most;
  };
  std::vector<double> share(m + 1);
  for (size_t i = 0; i <= n; ++i)
    for (size_t j = 0; j <= m; ++j) {
      if (i + j == 0)
        share[0] = 1;
      else
        share[j] =
            ((i ? double(i) * share[j] : 0) + (j ? double(j) * share[j - 1] : 0)) / double(i + j);
      if (!inside(i, j)) share[j] = 0;
    }
  return D <= 0 ? 1 : std::clamp(1 - share[m], 0., 1.);
}

KolmogorovSmirnov kolmogorov_smirnov(std::vector<double> a, std::vector<double> b) {
  check(!a.empty() && !b.empty(), "the Kolmogorov-Smirnov test requires two non-empty samples");
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  double D = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const double v = std::min(a[i], b[j]);
    while (i < a.size() && a[i] == v) ++i;
    while (j < b.size() && b[j] == v) ++j;
    D = std::max(D, std::abs(double(i) / double(a.size()) - double(j) / double(b.size())));
  }
  return {D, p_value(a.size(), b.size(), D)};
}

}  // namespace horner::diag

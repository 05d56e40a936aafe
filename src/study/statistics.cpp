#include "study/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/check.h"

namespace horner::study {

// The continued fraction of the incomplete beta function I_x(a, b), by Lentz's method; it converges
// quickly for x < (a + 1) / (a + b + 2).
static double beta_fraction(double a, double b, double x) {
  constexpr int kMost = 10000;
  constexpr double kTiny = 1e-300, kEnough = 1e-16;
  const auto nonzero = [](double y) { return std::abs(y) < kTiny ? kTiny : y; };
  double c = 1, d = 1 / nonzero(1 - (a + b) * x / (a + 1)), f = d;
  for (int m = 1; m <= kMost; ++m) {
    double step = 1;
    for (const bool odd : {false, true}) {
      const double k = odd ? -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
                           : m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
      d = 1 / nonzero(1 + k * d), c = nonzero(1 + k / c);
      step = c * d, f *= step;
    }
    if (std::abs(step - 1) < kEnough) break;
  }
  return f;
}

static double incomplete_beta(double a, double b, double x) {
  if (x <= 0 || x >= 1) return x <= 0 ? 0 : 1;
  const double log_factor =
      std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) + a * std::log(x) + b * std::log1p(-x);
  if (x < (a + 1) / (a + b + 2)) return std::exp(log_factor) * beta_fraction(a, b, x) / a;
  return 1 - std::exp(log_factor) * beta_fraction(b, a, 1 - x) / b;
}

// The share of both tails beyond |t|.
static double two_tails(double t, double df) {
  return incomplete_beta(df / 2, 0.5, df / (df + t * t));
}

double t_cdf(double t, double df) {
  check(df > 0, "Student's t requires degrees of freedom above 0, not ", df);
  const double tail = two_tails(t, df) / 2;
  return t > 0 ? 1 - tail : tail;
}

double t_quantile(double p, double df) {
  check(p > 0 && p < 1, "a quantile is that of a share in (0, 1), not ", p);
  check(df > 0, "Student's t requires degrees of freedom above 0, not ", df);
  if (p == 0.5) return 0;
  const double tails = 2 * std::min(p, 1 - p);
  double low = 0, high = 1;
  while (two_tails(high, df) > tails) high *= 2;
  for (int i = 0; i < 200 && low < high; ++i) {
    const double middle = low + (high - low) / 2;
    if (middle == low || middle == high) break;
    (two_tails(middle, df) > tails ? low : high) = middle;
  }
  return p < 0.5 ? -high : high;
}

Interval t_interval(const std::vector<double>& values) {
  constexpr double kLevel = 0.95;
  const auto n = double(values.size());
  const double mean =
      values.empty() ? std::nan("") : std::accumulate(values.begin(), values.end(), 0.0) / n;
  if (values.size() < 2) return {mean, -INFINITY, INFINITY, 1, values.size()};
  double squares = 0;
  for (const double x : values) squares += (x - mean) * (x - mean);
  const double error = std::sqrt(squares / (n - 1) / n);
  const double half = t_quantile((1 + kLevel) / 2, n - 1) * error;
  const double p = error > 0 ? two_tails(mean / error, n - 1) : mean == 0 ? 1 : 0;
  return {mean, mean - half, mean + half, p, values.size()};
}

std::vector<double> holm(const std::vector<double>& p) {
  std::vector<size_t> order;
  for (size_t i = 0; i < p.size(); ++i)
    if (!std::isnan(p[i])) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] < p[b]; });
  std::vector<double> out(p.size(), std::nan(""));
  double least = 0;  // adjusted values do not fall as p grows
  for (size_t rank = 0; rank < order.size(); ++rank) {
    least = std::max(least, std::min(1.0, double(order.size() - rank) * p[order[rank]]));
    out[order[rank]] = least;
  }
  return out;
}

}  // namespace horner::study

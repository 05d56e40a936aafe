// Statistics of samples: linear regression, quantiles, the bootstrap, the two-sample
// Kolmogorov-Smirnov test.
#pragma once

#include <cstdint>
#include <vector>

namespace horner::diag {

// Weighted least squares: y = slope x + offset.
struct Line {
  double n = 0, x = 0, y = 0, xx = 0, xy = 0, yy = 0;  // weighted sums

  void add(double x, double y, double weight = 1);
  double slope() const;   // NaN if all points have the same x
  double offset() const;  // at x = 0
  double r2() const;      // share of the variance of y that the line explains
};

// The p-quantile of the finite values, linearly interpolated.
double quantile(std::vector<double> sample, double p);

// The median of the finite values, with a 95 % interval: the quantiles of the medians of 2,000
// samples drawn from them with replacement (percentile bootstrap).
struct Interval {
  double middle, low, high;
};
Interval bootstrap_median(std::vector<double> sample, uint64_t seed = 0);

struct KolmogorovSmirnov {
  double D;  // largest distance of the two distribution functions
  double p;  // exact p-value
};
// The null distribution counts the paths from (0, 0) to (n, m) that stay near the diagonal; ties
// make it conservative.
KolmogorovSmirnov kolmogorov_smirnov(std::vector<double> a, std::vector<double> b);

}  // namespace horner::diag

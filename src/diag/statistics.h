// Statistics of samples: straight lines, quantiles, and the two-sample Kolmogorov-Smirnov test.
#pragma once

#include <cstddef>
#include <vector>

namespace horner::diag {

// The line through weighted points with the least squared error: y = slope x + offset.
struct Line {
  double n = 0, x = 0, y = 0, xx = 0, xy = 0, yy = 0;  // sums of weight times these

  void add(double x, double y, double weight = 1);
  double slope() const;   // NaN where the points have one x only
  double offset() const;  // at x = 0
  double r2() const;      // the share of y's variance that the line explains
};

// The value below which a share p of the sample is, between its neighbours linearly.
double quantile(std::vector<double> sample, double p);

struct KolmogorovSmirnov {
  double D;  // the largest distance of the two distribution functions
  double p;  // how likely that much or more is for samples of one distribution: exact
};
// The null distribution counts the paths from (0, 0) to (n, m) that stay near the diagonal; values
// that are equal make it conservative.
KolmogorovSmirnov kolmogorov_smirnov(std::vector<double> a, std::vector<double> b);

}  // namespace horner::diag

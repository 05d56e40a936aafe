// Intervals and tests of small samples: Student's t, paired differences, Holm's correction.
#pragma once

#include <cstddef>
#include <vector>

namespace horner::study {

// Probability that Student's t with `df` degrees of freedom is at most `t`.
double t_cdf(double t, double df);
// The t below which the share `p`, in (0, 1), lies.
double t_quantile(double p, double df);

// The mean of a sample, its 95 % t-interval and the two-sided p-value of "the mean is 0". With
// fewer than two values the interval is infinite and p is 1.
struct Interval {
  double mean, low, high, p;
  size_t n;
};
Interval t_interval(const std::vector<double>&);

// Holm's step-down correction: p-values that may be compared with the level of the whole family.
// In the order given; NaN stays NaN and does not count.
std::vector<double> holm(const std::vector<double>& p);

}  // namespace horner::study

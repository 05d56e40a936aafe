// The median of at least one number; of an even count, the mean of the two in the middle.
#pragma once

#include <algorithm>
#include <vector>

namespace horner {

inline double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return (x[x.size() / 2] + x[(x.size() - 1) / 2]) / 2;
}

}  // namespace horner

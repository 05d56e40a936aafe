// The middle of some numbers; of an even number of them the upper one.
#pragma once

#include <algorithm>
#include <vector>

namespace horner {

inline double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + int64_t(x.size() / 2), x.end());
  return x[x.size() / 2];
}

}  // namespace horner

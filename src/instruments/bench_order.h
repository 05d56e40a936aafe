// The distance between softmax and attention with the series of exp cut at order n.
#pragma once

#include <cstdint>
#include <vector>

namespace horner::instruments {

struct OrderCase {
  int64_t T = 256, D = 64;
  std::vector<double> deviations{0.5, 1, 2, 3};  // of the scores
  int highest = 10;
  uint64_t seed = 0;
};

struct OrderError {
  double deviation;
  int order;
  bool centred;
  double rms, median;  // over rows t: |o_t - softmax's| / |softmax's|
};

// Rows taylor1 .. and centred_taylor1 .. on Gaussian q, k and v, one head with a causal mask, all
// in double by `reference`.
std::vector<OrderError> order_errors(const OrderCase&);

}  // namespace horner::instruments

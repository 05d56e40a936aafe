// Which Taylor order of exp a head requires: is it "really linear"?
#pragma once

#include "nn/rows.h"

namespace horner::diag {

inline constexpr int kMostOrder = 128;

// The logarithms of the mean of |x|^n / n! over scores x [n] in double, for n = 0, 1, …, orders;
// logarithms, because the terms exceed a double. The dominant order has the largest.
std::vector<double> log_term_means(const at::Tensor& scores, int orders = kMostOrder);
int dominant_order(const std::vector<double>& log_term_means);

struct HeadSeries {
  int dominant = 0;    // dominant_order of its scores
  double largest = 0;  // |x|
  // The relative error of the head's output, against that of its own operator, over all rows with
  // the series of exp truncated at order 0, 1, …, plain and centred; up to kMostOrder or the order
  // of the operator itself, or until it is far below 1 %.
  std::vector<double> plain, centred;
};
// For each head, over the rows of `queries`, in double.
std::vector<HeadSeries> series(const attn::Spec&, const attn::Inputs&, std::span<const nn::Query>);

// The least order from which the error stays below `most`; kMostOrder + 1 if there is none.
int enough(const std::vector<double>& errors, double most = 0.01);

}  // namespace horner::diag

// How much of a head the Taylor series of exp needs: is it "really linear"?
#pragma once

#include "nn/rows.h"

namespace horner::diag {

inline constexpr int kMostOrder = 128;

struct HeadSeries {
  int dominant = 0;    // the order n with the largest mean |x|^n / n!
  double largest = 0;  // |x|
  // The relative error of the head's output, all rows together, with the series cut at order
  // 0, 1, …, plain and centred; up to kMostOrder, or until it is far below 1 %.
  std::vector<double> plain, centred;
};
// For each head; the rows of `queries` together, in double.
std::vector<HeadSeries> series(const attn::Spec&, const attn::Inputs&, std::span<const nn::Query>);

// The least order from which on the error stays below `most`; kMostOrder + 1 where there is none.
int enough(const std::vector<double>& errors, double most = 0.01);

}  // namespace horner::diag

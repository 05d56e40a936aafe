// Does the distance vanish when the number of selected tokens grows with the length? Each row
// selects N = f n of the n tokens that it sees; its distance d (geometry.h) scales as n^slope.
//   slope < 0: d -> 0, as the paper's Corollary 2 is read for N in proportion to L
//   slope > 0: d grows
// f = 1 stands for N = n - 1, the last N before the sum of distances is empty: Corollary 2 (ii),
// N -> L at a fixed L.
#pragma once

#include "diag/statistics.h"
#include "nn/rows.h"

namespace horner::diag {

inline constexpr double kFractions[] = {0.06, 0.25, 0.5, 0.75, 0.9, 1};
int64_t top_of(double fraction, int64_t n);  // N, from 1 to n - 1

// Means over the rows that see between half a length and all of it.
struct GrowthSums {
  double rows = 0, n = 0, distance = 0, each = 0, expected = 0;  // sums over rows
};
// Of one head and one fraction: lines of logarithms against log n, over rows.
struct Growth {
  Line distance;  // d
  Line each;      // d / (n - N), per token that is not selected
  Line expected;  // the expectation A of d for random sets
  std::vector<GrowthSums> lengths;
};
// A row of query t; ignored below 8 visible tokens, where N is a coarse fraction of n.
void add_row(Growth&, const std::vector<int64_t>& lengths, int64_t t, int64_t n, int64_t N,
             double distance, double expected);

// 16 evenly spaced queries among those that see between half of each length and all of it.
std::vector<nn::Query> growth_queries(const std::vector<int64_t>& lengths);

// "grows" if the interval is above 0, "falls" if it is below, else "undecided". Fewer than six
// heads have no 95 % interval (all of them are on the same side of a median in 2 of 2^heads cases).
inline constexpr size_t kLeastHeads = 6;
const char* verdict(const Interval&, size_t heads);

}  // namespace horner::diag

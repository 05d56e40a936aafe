// What one row of weights a selects among points x (arXiv 2508.17821, sections 4 and 5). I is the
// set of the N largest weights, s = sum_{i in I} a_i x_i, abar = sum_{i in I} a_i; n tokens seen.
//   distance    d = sum_{i not in I} |a_i x_i - s|
//   Theorem 1   d <= (1 - abar) d1 + max_{j in I} |x_j| (abar (n - N) - (1 - abar))
//   separable   the share of i in I with |a_i x_i - s| < r = min_{j not in I} |a_j x_j - s|
//   Theorem 2   bounds of that share, for unit points
// docs/diagnosis.md says which of these formulas are the paper's and which are reconstructed.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace horner::diag {

struct Points {
  at::Tensor x;                // [S, d], float32
  std::vector<double> square;  // [S], |x_i|^2
  at::Tensor apart;            // [S, S], squared distances; undefined above kMostApart points
  double least = 0;            // least distance of two points; 0 if not measured
  double across = 0;           // upper bound of the distance of two points
};
inline constexpr int64_t kMostApart = 4096;
// `unit`: normalizes each point.
Points make_points(const at::Tensor& x, bool unit);

// The visible tokens of a query, and statistics of their points.
struct Seen {
  int64_t begin, count;
  double square = 0;   // mean of |x_i|^2
  double product = 0;  // mean of x_i.x_j, i != j
};
void measure_seen(const Points&, std::span<Seen>);  // rows sorted by end

// For one row and one N. NaN if the row sees no more than N tokens, or if not requested.
struct Distance {
  double distance, bound;
  double
      root_bound;  // Theorem 1 with a root around its bracket, as printed in a summary: not a bound
  // The expectation for a random set I: reading A draws I from all sets of N tokens (the main term
  // of Theorem 1.2, reconstructed; it is off by at most `gap`); reading B keeps the weights in rank
  // order and permutes the tokens (root mean square).
  double expected, gap, permuted;
};
// The bounds of the first and third line are our reconstruction of Theorem 2, whose formulas are
// not printed in any source at hand: Markov's and Hoeffding's inequality with the paper's xi.
struct Separation {
  double share;
  double lower_markov, lower;  // 1 - sum xi / (r N), and the share of xi_i < r: both always hold
  double upper_hoeffding;      // mean exp(-(xi - r)^2 / 2): does not hold, not even on average
  double upper_mean;           // in expectation, for independent points of uniform direction
  double upper;                // the share of i whose |a_i x_i - s| can be below r: always holds
};

struct Asked {
  std::vector<int64_t> tops;  // ascending
  bool distances = true, separations = true;
  std::vector<bool> bounded = {};  // tops that need `bound` and `gap`; empty: all
  bool tokens = false;             // fill `Measured::tokens`
};
struct Measured {  // [rows][tops]
  std::vector<Distance> distances;
  std::vector<Separation> separations;
  // The tokens of I, largest weight first, ~token if it is not separable; [rows][sum of tops], the
  // sets of one row one after the other.
  std::vector<int32_t> tokens;
};
// weights [R, S], float32: nonzero only at a row's visible tokens, where they sum to 1.
Measured measure(const Points&, const at::Tensor& weights, std::span<const Seen>, const Asked&);

}  // namespace horner::diag

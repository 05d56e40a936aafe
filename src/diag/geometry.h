// What one row of weights a selects among points x (arXiv 2508.17821, sections 4 and 5). I is the
// set of the N largest weights, s = sum_{i in I} a_i x_i, abar = sum_{i in I} a_i; n tokens seen.
//   distance    d = sum_{i not in I} |a_i x_i - s|
//   Theorem 1   d <= (1 - abar) d1 + max_{j in I} |x_j| (abar (n - N) - (1 - abar))
//   separable   the share of i in I with |a_i x_i - s| < r = min_{j not in I} |a_j x_j - s|
//   Theorem 2   bounds of that share, of points of length 1
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace horner::diag {

struct Points {
  at::Tensor x;                // [S, d], float32
  std::vector<double> square;  // [S], |x_i|^2
  at::Tensor apart;            // [S, S], squared distances; undefined above kMostApart points
  double least = 0;            // no two are nearer: 0 where that was not measured
  double across = 0;           // no two are further apart
};
inline constexpr int64_t kMostApart = 4096;
// `unit`: each divided by its length.
Points make_points(const at::Tensor& x, bool unit);

// The tokens that a query sees, and what a random one of them is like.
struct Seen {
  int64_t begin, count;
  double square = 0;   // mean of |x_i|^2
  double product = 0;  // mean of x_i.x_j, i != j
};
void measure_seen(const Points&, std::span<Seen>);  // ordered by their ends

// Of one row and one N. NaN where the row sees no more than N tokens, or where not asked for.
struct Distance {
  double distance, bound;
  double root_bound;  // Theorem 1 with a root around its bracket, as a summary prints it: no bound
  // The expectation when the set I is random: reading A draws I among all sets of N tokens
  // (Theorem 1.2, its main term, to which at most `gap` is to be added); reading B keeps weights
  // with their ranks and permutes the tokens (root of the mean square).
  double expected, gap, permuted;
};
struct Separation {
  double share;
  double lower_printed, lower;  // 1 - sum xi / (r N), and the share of xi_i < r: both hold surely
  double upper_printed;         // mean exp(-(xi - r)^2 / 2): holds neither surely nor on average
  double upper_mean;            // of an expectation: independent points, uniform in direction
  double upper;  // the share of i whose |a_i x_i - s| can be below r at all: holds surely
};

struct Asked {
  std::vector<int64_t> tops;  // ascending
  bool distances = true, separations = true;
  std::vector<bool> bounded = {};  // for which tops `bound` and `gap` are wanted; empty: all
};
struct Measured {  // [rows][tops]
  std::vector<Distance> distances;
  std::vector<Separation> separations;
};
// weights [R, S], float32: a row's are at its seen tokens and sum to 1.
Measured measure(const Points&, const at::Tensor& weights, std::span<const Seen>, const Asked&);

}  // namespace horner::diag

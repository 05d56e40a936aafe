// What several heads of a layer separate together. For one query and N, a token is selected by m of
// the H heads (it is among their N largest weights) and covered if at least one of those m
// separates it (geometry.h). With independent heads that each separate a token with probability p,
//   1 - (1 - p)^m   of the tokens that m heads select are covered,
//   1 - (1 - p)^H   is the paper's number: every head selects the token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace horner::diag {

// For one layer and N: numbers of tokens, summed over rows, by the number m of heads that select
// them; index m - 1.
struct Coverage {
  int64_t layer = 0, N = 0;
  std::vector<double> selected, covered;

  int64_t heads() const { return int64_t(selected.size()); }
  double share() const;          // separable tokens of a head: p
  double measured() const;       // of the tokens that any head selects, the share that is covered
  double expected() const;       // the same for independent heads: the mean of 1 - (1 - p)^m
  double paper() const;          // 1 - (1 - p)^H
  double separated = 0, of = 0;  // pairs of a head and a token that it selects
};

// One row: the sets of all heads, ~token for those that the head does not separate. `count` and
// `hit` are work space, zero before and after, at least as long as the largest token.
void add_row(Coverage&, std::span<const std::span<const int32_t>> of_heads, double weight,
             std::vector<int32_t>& count, std::vector<uint8_t>& hit);

// 1 - (1 - p)^m.
double at_least_one(double p, double m);

}  // namespace horner::diag

// How strongly the weights of a row react to its scores: Lemma 2 of arXiv 2508.17821, for every
// normaliser a_i = F(x_i) / Z whose F is a function of one score.
//   Z = sum F     J_ij = da_i / dx_j = (1[i = j] - a_i) F'(x_j) / Z
//   derived       |J| <= sqrt(n) |a| max|F'| / Z                         |I - a 1^T| = sqrt(n) |a|
//   with min F    |J| <= sqrt(n) |a| max|F'| / (n min F)                 Z >= n min F
//   two terms     |J| <= (1 + sqrt(n) |a|) max|F'| / (n min F)           |I| + |a| |1|
// The paper's own formula is not printed in any source at hand; all three are ours. |J| is at least
// the length of a column, so the first is at most sqrt(n) |a| / (1 - a_j) times too large, where j
// has the largest |F'|.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "attn/spec.h"

namespace horner::diag {

struct Jacobian {
  double norm;  // |J|, the largest singular value
  double derived, with_least, two_terms;
};

// Why Lemma 2 does not apply to a normaliser; "" if it does.
std::string why_no_jacobian(const attn::Spec&);

// The scores that one row sees, multiplied by `factor` (1 / T, or a factor of the row's length)
// before the weight; J is by the scores as given. The normaliser divides by its sum or by a count.
Jacobian jacobian(const attn::Spec&, std::span<const double> scores, double factor = 1);

// Normalisers with an F of one score to compare on the same scores, as variants of the catalog.
struct Pointwise {
  const char *name, *variant;
};
std::span<const Pointwise> pointwise_normalisers();

}  // namespace horner::diag

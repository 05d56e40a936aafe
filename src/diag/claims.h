// The paper's remaining claims as a few numbers each, from a diagnosis: several heads together,
// N in proportion to the length, Lemma 2, and where the 1/T law begins.
#pragma once

#include "diag/diagnose.h"

namespace horner::diag {

// Means over layers; the definitions are in coverage.h.
struct Covered {
  int64_t N;
  double share, measured, expected, paper;
};
std::vector<Covered> covered_by_top(const Diagnosis&);
// The tokens that m heads of a layer select, all layers together.
struct CoveredBy {
  int64_t heads;
  double tokens;  // their share of all selected tokens
  double measured, expected;
};
std::vector<CoveredBy> covered_by_heads(const Diagnosis&, int64_t N);

// Exponents of n with N = f n: medians over heads with 95 % intervals (growth.h).
struct Exponents {
  double fraction;
  Interval distance, each, expected;
};
std::vector<Exponents> exponents(const Diagnosis&);
// Corollary 2 (ii), at the largest length: d with one token left out over d with N = f n for the
// least f; the same per token that is left out.
struct LastToken {
  Interval distance, each;
};
LastToken last_token(const Diagnosis&);

struct JacobianSummary {
  std::string name;
  double norm, largest;               // median and maximum of |J|
  double derived, least, two_terms;   // medians of the bounds
  double attained, attained_largest;  // median and maximum of |J| over the derived bound
};
std::vector<JacobianSummary> jacobian_summaries(const Diagnosis&);

// A curve g(T) of one epsilon: the largest over heads, [temperature].
std::vector<double> largest_over_heads(const Diagnosis&, Sensitivity Head::* units,
                                       std::vector<std::vector<double>> Sensitivity::* what,
                                       size_t epsilon);
// -d log g / d log T between neighbouring temperatures: 1 for the 1/T law, 0 for a flat curve.
std::vector<double> local_exponents(const std::vector<double>& T, const std::vector<double>& g);
// The T from which the local exponent stays above 1/2, interpolated in log T; the first T if it
// does everywhere, NaN if it does not at the last.
double law_from(const std::vector<double>& T, const std::vector<double>& g);
// The least T of the grid from which the curves of all epsilons agree within 10 %; NaN for none.
double agree_from(const std::vector<double>& T, const std::vector<std::vector<double>>& curves);

}  // namespace horner::diag

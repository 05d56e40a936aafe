// Metrics of a row that need no points: dispersion, bounds of its scores, and the sensitivity of
// its weights to them.
#pragma once

#include "nn/rows.h"

namespace horner::diag {

// [H, R] each.
struct RowNumbers {
  at::Tensor entropy;  // -sum a log a
  at::Tensor support;  // 1 / sum a^2
  at::Tensor first;    // weight of the text's first token; 0 if it is not visible
  at::Tensor reach;    // sum a (t - s), mean distance to the keys
  at::Tensor largest;  // the largest weight
  at::Tensor spread;   // standard deviation of the scores
  // For Lemma 1 and Corollary 1: log(n a) of the largest and least weight, the largest |score|.
  // -2 |q| |k| <= -2 most <= log(n a_i) <= 2 most <= 2 |q| |k|
  at::Tensor log_high, log_low, most;
};
RowNumbers row_numbers(const nn::Rows&);

// g(T, eps) = |softmax((x + eps v) / T) - softmax(x / T)| / eps for each row, [H, R]; v [H, R, S]
// has length 1 over the visible tokens and is 0 elsewhere.
at::Tensor sensitivity(const at::Tensor& scores, const at::Tensor& hidden, const at::Tensor& v,
                       double T, double eps);
// The same for the weights of any operator, a row divided by its sum; count [1, R, 1] tokens seen.
struct RowScores {
  at::Tensor scores, hidden, count, v;
};
at::Tensor sensitivity(const attn::Spec&, bool softmax, const RowScores&, double T, double eps);
// For softmax: the bound that holds, and the one printed in Corollary 3.
double sensitivity_bound(double T, double eps);
double sensitivity_printed(double T);

// Random directions v, [H, R, S].
at::Tensor directions(const nn::Rows&, at::Generator);

}  // namespace horner::diag

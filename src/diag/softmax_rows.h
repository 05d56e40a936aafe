// What a softmax row tells without any points: how dispersed it is, how its scores are bounded, and
// how much its weights move with them.
#pragma once

#include "nn/rows.h"

namespace horner::diag {

// [H, R] each.
struct RowNumbers {
  at::Tensor entropy;  // -sum a log a
  at::Tensor support;  // 1 / sum a^2
  at::Tensor first;    // the weight of the first token of the text; 0 where it is not seen
  at::Tensor reach;    // sum a (t - s): how far back it looks
  at::Tensor largest;  // the largest weight
  at::Tensor spread;   // of its scores: their standard deviation
  // Of Lemma 1 and Corollary 1: log(n a) of the largest and the least weight, the largest |score|.
  // -2 |q| |k| <= -2 most <= log(n a_i) <= 2 most <= 2 |q| |k|
  at::Tensor log_high, log_low, most;
};
RowNumbers row_numbers(const nn::Rows&);

// g(T, eps) = |softmax((x + eps v) / T) - softmax(x / T)| / eps for each row, [H, R]; v [H, R, S]
// has length 1 over the tokens seen and is 0 elsewhere.
at::Tensor sensitivity(const at::Tensor& scores, const at::Tensor& hidden, const at::Tensor& v,
                       double T, double eps);
// Its bounds: what holds, and what is printed (Corollary 3).
double sensitivity_bound(double T, double eps);
double sensitivity_printed(double T);

// Random directions v for rows, [H, R, S].
at::Tensor directions(const nn::Rows&, at::Generator);

}  // namespace horner::diag

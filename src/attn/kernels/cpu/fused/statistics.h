// The statistics of a row, from a = |w| over the keys that it sees and A = sum a:
//   entropy -sum a/A log a/A = log A - sum a log a / A,  largest a/A,  a/A of the first key,
//   and the negative share of the weights, (A - W) / 2A.
#pragma once

#include "attn/kernels/cpu/vectors.h"

namespace horner::attn::kernels::HORNER_ISA {

// log2 x - kLogStart for x >= 0, within 1.4e-5 (enough for an entropy) and finite for 0:
// x = 2^e m, 1 <= m < 2, log2 m by a polynomial whose constant term is kLogStart.
inline constexpr float kLogStart = -2.8003640f;
inline Vec log2_from_start(Vec x) {
  x += 1.17549435e-38f;  // the smallest normal float: no effect on larger numbers
  const Vec m = mantissa(x);
  Vec p = m * 4.4873614e-2f - 4.1656372e-1f;
  p = p * m + 1.6311488f;
  p = p * m - 3.5507929f;
  p = p * m + 5.0917110f;
  return p * m + exponent(x);
}

// One row; each lane covers every kWidth-th key: A, the largest a, and sum a log a, with natural
// logs if the logs of the weights were known, else log2_from_start.
struct RowStatistics {
  Vec total{}, most{}, moment{};
  float first = 0;

  void add(Vec w) {
    const Vec a = abs(w);
    total += a;
    add_positive(a);
  }
  void add_positive(Vec w) {  // w >= 0; does not add to the total, which is W
    most = max(most, w);
    moment += w * log2_from_start(w);
  }
};

// Writes the statistics of n <= kWidth rows to [4, stride]. W: the sums of their weights.
inline void write(const RowStatistics* rows, const float* W, int n, bool logs_known, float* to,
                  int64_t stride) {
  alignas(64) float sums[kWidth] = {}, firsts[kWidth] = {};
  Vec total[kWidth] = {}, most[kWidth] = {}, moment[kWidth] = {};
  for (int i = 0; i < n; ++i) {
    sums[i] = W[i], firsts[i] = rows[i].first;
    total[i] = rows[i].total, most[i] = rows[i].most, moment[i] = rows[i].moment;
  }
  const Vec A = sum_each(total), top = largest_each(most);
  Vec M = sum_each(moment);
  if (!logs_known) M = (M + A * kLogStart) * 0.69314718f;
  // NaN for a row of which some weight is NaN or infinite; max keeps its second argument then.
  // The least sum is that of the reference.
  const Vec none{}, least = max(splat(1e-30f), A);
  const Vec share = choose(A == none, none, 1 / least + (A - A));
  const Vec entropy = choose(A == none, none, log(least) * (A * share) - M * share);
  const Vec out[4] = {max(none, entropy), top * share, load(firsts) * share,
                      max(none, (A - load(sums)) * 0.5f * share)};
  for (int s = 0; s < 4; ++s)
    for (int i = 0; i < n; ++i) to[s * stride + i] = out[s][i];
}

}  // namespace horner::attn::kernels::HORNER_ISA

// What a row says of itself beside its sums, from a = |w| over the keys that it sees, A = sum a:
//   entropy -sum a/A log a/A = log A - sum a log a / A,  largest a/A,  a/A of the first key,
//   and the share of the weights that are negative, (A - W) / 2A.
#pragma once

#include "attn/exec/kernels/vec.h"

namespace horner::attn::kernels {
namespace HORNER_ISA {

struct Tally {
  Vec total{}, moment{}, most{};  // A, sum a log a and the largest a, of every kWidth-th key
  float first = 0;

  // kWidth weights, and the logs of their sizes where those are known.
  void add(Vec w) {
    const Vec a = abs(w);
    total += a;
    moment += a * log_near(a);
    most = max(most, a);
  }
  void add(Vec w, Vec log_a) {  // w >= 0
    total += w;
    moment += choose(w > Vec{}, w * log_a, Vec{});
    most = max(most, w);
  }
  void add(const Tally& t) {
    total += t.total;
    moment += t.moment;
    most = max(most, t.most);
  }
  // All weights so far become e^-by times what they were.
  void shrink(float by, float factor) {
    moment = factor * (moment - by * total);
    total *= factor, most *= factor, first *= factor;
  }
  // Into [4, rows] numbers at this row, whose weights add up to W.
  void write(float* to, int64_t rows, float W) const {
    const float A = sum(total), scale = A > 0 ? 1 / A : 0;
    const float entropy = A > 0 ? logf(A) - sum(moment) * scale : 0;
    to[0] = entropy < 0 ? 0 : entropy;  // by rounding
    to[rows] = largest(most) * scale;
    to[2 * rows] = first * scale;
    to[3 * rows] = A > W ? (A - W) / 2 * scale : 0;
  }
};

}  // namespace HORNER_ISA
}  // namespace horner::attn::kernels

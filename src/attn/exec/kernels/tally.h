// What a row says of itself beside its sums, from a = |w| over the keys that it sees, A = sum a:
//   entropy -sum a/A log a/A = log A - sum a log a / A,  largest a/A,  a/A of the first key,
//   and the share of the weights that are negative.
#pragma once

#include "attn/exec/kernels/vec.h"

namespace horner::attn::kernels {
namespace HORNER_ISA {

struct Tally {
  float total = 0, moment = 0, most = 0, negative = 0, first = 0;

  // kWidth weights, and the logs of their sizes where those are known.
  struct Sums {
    Vec total{}, moment{}, most{}, negative{};

    void add(Vec w, Vec log_a) {
      const Vec a = max(w, -w);
      total += a;
      moment += choose(a > Vec{}, a * log_a, Vec{});
      most = max(most, a);
      negative += max(-w, Vec{});
    }
    void add(Vec w) { add(w, log(max(w, -w))); }
  };
  void add(const Sums& s) {
    total += sum(s.total);
    moment += sum(s.moment);
    negative += sum(s.negative);
    const float top = largest(s.most);
    most = top > most ? top : most;
  }
  // All weights so far become e^-by times what they were.
  void shrink(float by, float factor) {
    if (total > 0) moment = factor * (moment - by * total);
    total *= factor, most *= factor, negative *= factor, first *= factor;
  }
  // Into [4, rows] numbers at this row.
  void write(float* to, int64_t rows) const {
    const float scale = total > 0 ? 1 / total : 0;
    to[0] = total > 0 ? logf(total) - moment * scale : 0;
    to[rows] = most * scale;
    to[2 * rows] = first * scale;
    to[3 * rows] = negative * scale;
  }
};

}  // namespace HORNER_ISA
}  // namespace horner::attn::kernels

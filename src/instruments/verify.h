// Checks an execution against the truth, `reference` in double, on random inputs: the output and
// the gradient of every input.
//
// The error of an execution may be at most twice that of `reference` in the same dtype, plus a few
// ulps. The error of `reference` itself is bounded by a multiple of the dtype's rounding.
#pragma once

#include <string>
#include <vector>

#include "attn/attend.h"

namespace horner::instruments {

using namespace attn;

struct Case {
  int64_t B = 2, H = 4, G = 2, T = 37, S = 37, D = 16, E = 16;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  uint64_t seed = 0;
  bool hot = false;     // scores up to about +-30, unless the variant is too sensitive
  bool padded = false;  // with a `keep`
  bool packed = false;  // with `cu_seqlens`
  bool gradients = true;
};
std::string text(const Case&);

// Awkward sizes, grouped heads, padding, packing, hot scores.
std::vector<Case> standard_cases(at::ScalarType, at::Device = at::kCPU, uint64_t seed = 0);

// Inputs for every stage of the spec.
Inputs random_inputs(const Spec&, const Case&);

struct Difference {
  std::string of;                               // "output", "d q", ...
  double error;                                 // the largest distance from the truth
  double allowed;                               // the limit of the error
  double ratio;                                 // error over the reference's error in that dtype
  bool ok() const { return error <= allowed; }  // false for a NaN
};

// Without differences, and with `why_not` set, if the execution cannot run the case.
struct Verdict {
  std::string why_not;
  std::vector<Difference> differences;
  const Difference* worst() const;  // the largest error / allowed; null when empty
  bool ok() const { return worst() == nullptr || worst()->ok(); }
};
Verdict verify(const Spec&, const Execution&, const Case&);

}  // namespace horner::instruments

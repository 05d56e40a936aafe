// Is an execution right? It is compared with the truth, `reference` in double, on fresh random
// inputs: the output and the gradient of every input.
//
// An execution may be at most twice as far from the truth as `reference` in the same dtype is, plus
// a few ulps. `reference` itself is held to a multiple of the dtype's own rounding.
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
  bool hot = false;     // scores up to about +-30, where the variant allows it
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
  double allowed;                               // error may be at most this
  double ratio;                                 // of the reference's own error in that dtype
  bool ok() const { return error <= allowed; }  // false for a NaN
};

// Empty, with `why_not` set, when the execution cannot run the case.
struct Verdict {
  std::string why_not;
  std::vector<Difference> differences;
  const Difference* worst() const;  // the largest error over what is allowed; null when empty
  bool ok() const { return worst() == nullptr || worst()->ok(); }
};
Verdict verify(const Spec&, const Execution&, const Case&);

}  // namespace horner::instruments

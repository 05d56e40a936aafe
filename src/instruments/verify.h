// Checks an execution against the truth, `reference` in double, on random inputs: the output and
// the gradient of every input. Errors are relative to the RMS of the truth R. With e the errors of
// the n elements, "own" those of `reference` in the dtype of the case, and a = 2 own + floor:
//
//   rms e                     <= a
//   max |e_i| / (1 + |R_i|)   <= 2 own + 8 a               no element stands out
//   |<e, R>| / <R, R>         <= 2 own + 4 a / sqrt n + f  no factor is wrong
//
// where f is 2 ulps of the dtype of sums, and the floor is f, plus half an ulp where a result is
// rounded to 16 bits. The rule is the same for every variant, case and gradient. docs/testing.md
// gives the reasons, and mutants.h the faults that it has to notice.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "attn/attend.h"
#include "attn/inputs.h"

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
  std::vector<int64_t> cuts = {};  // of packed sequences; empty: four, of which one is empty
};
std::string text(const Case&);

// Awkward sizes, grouped heads, padding, packing, hot scores, long rows.
std::vector<Case> standard_cases(at::ScalarType, at::Device = at::kCPU, uint64_t seed = 0);

// Whether every element has a value in the dtype: in float16, up to 65504. A case whose truth has
// none, in its output or in a gradient, is not asked in that dtype.
bool in_range(const at::Tensor&, at::ScalarType);

// Inputs for every stage of the spec.
Inputs random_inputs(const Spec&, const Case&);

struct Results {
  at::Tensor out;
  std::vector<std::pair<const Input*, at::Tensor>> gradients;
};

// The errors of a tensor, relative to a unit.
struct Errors {
  double rms, largest, factor;
};

// What is expected of the output or of a gradient.
struct Limits {
  std::string of;
  at::Tensor truth;
  double unit;              // the RMS of the truth; of terms that cancel, their natural scale
  double scale;             // the natural scale of a gradient; 0 for the output
  Errors own, most;         // of `reference` in the dtype of the case; that are allowed
  double most_by_old_rule;  // the largest error, in no unit
};

// A case, and what its results are compared with.
struct Trial {
  Spec spec;
  Case on;
  Inputs in;
  at::Tensor direction;        // the gradient of the output; undefined without gradients
  Results truth;               // `reference` in double
  std::vector<Limits> limits;  // of the output, then of the gradients
};
Trial trial(const Spec&, const Case&);

// Where a fault can be put into any execution (mutants.h).
struct Hook {
  std::function<at::Tensor(const Execution&, const Spec&, const Inputs&)> forward;
  std::function<void(const Inputs&, Results&)> gradients;
};

struct Difference {
  std::string of;                               // "output", "d q", ...
  double error;                                 // relative to the truth
  double allowed;                               // the limit of the error
  double ratio;                                 // error over the reference's error in that dtype
  bool ok() const { return error <= allowed; }  // false for a NaN
};

// Without differences, and with `why_not` set, if the execution cannot run the case.
struct Verdict {
  std::string why_not;
  std::vector<Difference> differences;
  bool old_rule_ok = true;          // by the rule that this one replaced, for comparison
  const Difference* worst() const;  // the largest error / allowed; null when empty
  bool ok() const { return worst() == nullptr || worst()->ok(); }
};
Verdict judge(const Trial&, const Results&);
Verdict verify(const Trial&, const Execution&, const Hook& = {});
Verdict verify(const Spec&, const Execution&, const Case&);

}  // namespace horner::instruments

// Faults that the check has to notice: a table of small errors, such as those of a kernel, put into
// any execution by one hook. `horner check --mutants` and mutants_test loop over it.
#pragma once

#include <span>
#include <string>

#include "instruments/verify.h"

namespace horner::instruments {

struct Mutant {
  const char* name;
  const char* about;     // what is wrong
  const char* variants;  // on which it is tried, separated by spaces
  Hook hook;
  bool (*applies)(const Spec&, const Case&) = [](const Spec&, const Case&) { return true; };
};
std::span<const Mutant> mutants();

std::vector<std::string> variants_of(const Mutant&);

// What the check says of a mutant of one execution, over the cases to which it applies.
struct Hunt {
  size_t ran = 0;            // cases, until both rules noticed it
  bool by_old_rule = false;  // noticed by the rule that this one replaces
  std::string caught = "";   // by what: "d q on B2 H4 ..."; "" when it was missed
  // That case ran on `reference`, because the execution refuses the changed operator.
  bool on_reference = false;
};
// With `compare`, goes on until the old rule notices it too, or to the last case.
Hunt hunt(const Mutant&, const Execution&, std::span<const Trial>, bool compare);

// The cases of the hunts: the standard ones, the long one last.
std::vector<Trial> trials(const Spec&, at::ScalarType, at::Device = at::kCPU, uint64_t seed = 0);

}  // namespace horner::instruments

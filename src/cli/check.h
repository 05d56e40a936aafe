// What the two forms of `horner check` share.
#pragma once

#include "attn/attend.h"
#include "cli/command.h"

namespace horner::cli {

struct CheckOptions {
  std::vector<std::string> variants, executions, dtypes;  // empty: all, or the usual ones
  std::string device = "cpu";
  int64_t seed = 0;
  bool forward_only = false, mutants = false, json = false, verbose = false;
};

std::vector<const attn::Execution*> selected_executions(const CheckOptions&);

// Whether the check notices the faults of instruments/mutants.h.
Outcome check_mutants(const CheckOptions&);

}  // namespace horner::cli

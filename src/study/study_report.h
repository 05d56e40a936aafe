// The report of runs: what they say, the order sweep, the ablation table, the curves.
#pragma once

#include "report/report.h"
#include "study/runs.h"

namespace horner::study {

struct Origin {
  std::string title = "Runs", command = "", version = "";
};
report::Report make_report(const std::vector<RunData>&, const Origin&);

}  // namespace horner::study

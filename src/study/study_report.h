// The report of runs: findings, order sweep, ablation table, curves.
#pragma once

#include "report/report.h"
#include "study/runs.h"

namespace horner::study {

struct Origin {
  std::string title = "Runs", command = "", version = "";
};
report::Report make_report(const std::vector<RunData>&, const Origin&);

}  // namespace horner::study

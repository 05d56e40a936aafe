// The report of runs: findings, order sweep, ablation table, curves.
#pragma once

#include "report/report.h"
#include "study/runs.h"

namespace horner::study {

struct Origin {
  std::string title = "Runs", command = "", version = "";
  std::vector<std::string> added = {};  // rates that the sweep added: "text/l2/lr0.008"
};
report::Report make_report(const std::vector<RunData>&, const Origin&);
// Speed and memory, which are the machines' and differ from one time to the next: the report of
// the same runs is the same.
report::Report make_speeds(const std::vector<RunData>&, const Origin&);

}  // namespace horner::study

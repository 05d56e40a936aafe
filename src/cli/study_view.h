// What a user sees of the runs of a study: progress, who runs what, a summary.
#pragma once

#include "cli/options.h"
#include "cli/table.h"
#include "core/stopwatch.h"
#include "study/runner.h"
#include "study/study.h"

namespace horner::cli {

// Progress of the runs on stderr: a table that is redrawn on a terminal; elsewhere a line when a
// run ends, and one per run every half minute.
struct Live {
  const study::Study& study;
  std::vector<study::Status> seen;
  size_t lines = 0;
  Stopwatch clock, since;

  void show(const std::vector<study::RunState>& all);

 private:
  Row row(size_t i, const study::RunState& p) const;
  void draw(const std::vector<study::RunState>& all);
};

// --list: the runs and who has them.
Outcome list_runs(const study::Study&, bool json);

// --json: how the runs ended.
Json summary_json(const study::Study&, const std::vector<study::RunState>& all,
                  const std::vector<std::string>& findings, const std::string& page);

}  // namespace horner::cli

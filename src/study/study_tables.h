// The tables of a study's report.
#pragma once

#include "report/report.h"
#include "study/runs.h"

namespace horner::study {

double mean_of(const Group&, const char* field);  // of result.json, over seeds; NaN without
std::string with_spread(const char* format, const Spread&);  // "0.31 ± 0.02"

report::Section ablation(const std::vector<TaskData>&);
report::Section speeds(const std::vector<TaskData>&);

// Each appends its section, unless it would be empty.
void add_comparisons(const std::vector<TaskData>&, std::vector<report::Section>&);
void add_rates(const std::vector<TaskData>&, std::vector<report::Section>&);
// Loss against the learning rate.
void add_rate_chart(const TaskData&, std::string (*group)(const Group&),
                    std::vector<report::Section>&);

}  // namespace horner::study

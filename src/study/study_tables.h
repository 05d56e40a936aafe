// The tables of a study's report.
#pragma once

#include "report/report.h"
#include "study/runs.h"

namespace horner::study {

report::Section ablation(const std::vector<TaskData>&);
report::Section speeds(const std::vector<TaskData>&);

// Each appends its section, unless it would be empty.
void add_length_table(const std::vector<TaskData>&, std::vector<report::Section>&);
void add_comparisons(const std::vector<TaskData>&, std::vector<report::Section>&);
void add_rates(const std::vector<TaskData>&, std::vector<report::Section>&);
// Loss against the learning rate.
void add_rate_chart(const TaskData&, std::string (*group)(const Group&),
                    std::vector<report::Section>&);

}  // namespace horner::study

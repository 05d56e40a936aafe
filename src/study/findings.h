// The results of a study in sentences, each computed from the runs.
#pragma once

#include "study/runs.h"

namespace horner::study {

std::vector<std::string> findings(const std::vector<TaskData>&);

// A sentence for every run whose steps repeat or run backwards in its metrics.jsonl.
std::vector<std::string> repeated_steps(const std::vector<RunData>&);

std::string formatted(const char* format, double x);  // printf format; "–" if not finite
std::string counted(int64_t);                         // 12,345
std::string joined(const std::vector<std::string>&);  // "a, b and c"
std::string percent(double share);                    // 0.0312 -> "3.1 %"
std::string signed_percent(double share);             // "+3.1 %", "−0.2 %"
std::string task_title(const TaskData&);              // "Recall of 16 pairs", "Text"

// "+3.1 % (+2.2 % to +4.0 %)", or in points of accuracy; without brackets for one seed.
std::string change_text(const TaskData&, const Comparison&);

// A group's loss relative to softmax's, minus 1; NaN without softmax.
double behind(const TaskData&, const Group&);

}  // namespace horner::study

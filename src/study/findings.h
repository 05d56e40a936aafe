// What the numbers of a study say, in sentences: each computed, none that the numbers do not bear.
#pragma once

#include "study/runs.h"

namespace horner::study {

std::vector<std::string> findings(const std::vector<TaskData>&);

std::string formatted(const char* format, double x);  // by printf's rules; "–" for no number
std::string percent(double share);                    // 0.0312 -> "3.1 %"
std::string signed_percent(double share);             // "+3.1 %", "−0.2 %"
std::string task_title(const TaskData&);              // "Recall of 16 pairs", "Text"

// The loss of a group over softmax's, less 1; NaN without either.
double behind(const TaskData&, const Group&);

}  // namespace horner::study

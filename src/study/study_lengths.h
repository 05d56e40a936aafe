// Sequences of other lengths than those of training: scores, and what the heads select.
#pragma once

#include "report/report.h"
#include "study/runs.h"

namespace horner::study {

using Sentences = std::vector<std::string>;

// Each appends what there is.
void add_lengths(const TaskData&, std::string (*group)(const Group&),
                 std::vector<report::Section>&);
void add_length_table(const std::vector<TaskData>&, std::vector<report::Section>&);
void add_heads(const std::vector<TaskData>&, std::vector<report::Section>&);
void say_lengths(const TaskData&, Sentences&);
void say_heads(const TaskData&, Sentences&);

}  // namespace horner::study

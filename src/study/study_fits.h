// The laws that a study's results follow, fitted (fits.h): loss against weights, recall against
// pairs and state.
#pragma once

#include "report/report.h"
#include "study/fits.h"
#include "study/study_lengths.h"

namespace horner::study {

void add_fits(const std::vector<TaskData>&, std::string (*group)(const Group&),
              std::vector<report::Section>&);
void add_fit_tables(const std::vector<TaskData>&, std::vector<report::Section>&);
void say_fits(const std::vector<TaskData>&, Sentences&);

}  // namespace horner::study

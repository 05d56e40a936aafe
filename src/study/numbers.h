// The runs of a report in one small file, from which the same page can be made again: settings,
// results, validations, and curves thinned to a hundred points.
//   {"horner-runs": 1, "title": …, "command": …, "settings": {of all runs}, "runs": [{…}, …]}
#pragma once

#include "study/runs.h"
#include "study/study_report.h"

namespace horner::study {

Json to_json(const std::vector<RunData>&, const Origin&);

// `where` is for error messages. Throws unless it is the content of such a file.
std::vector<RunData> runs_of(const Json&, const std::string& where);
Origin origin_of(const Json&, Origin otherwise);

bool is_numbers_file(std::string_view text);  // by its first field

}  // namespace horner::study

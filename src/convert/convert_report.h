// A conversion as a report: what it costs, what each head became and why, the controls.
#pragma once

#include "convert/convert.h"
#include "report/report.h"

namespace horner::convert {

report::Report make_report(const Result&, const nn::ModelConfig& teacher,
                           const std::vector<Sample>&, const std::string& command);

// The sentences of its summary. A model is ahead or behind only where the paired 95 % interval over
// validation sequences excludes 0.
std::vector<std::string> findings(const Result&);

}  // namespace horner::convert

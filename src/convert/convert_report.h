// A conversion as a report: what it costs, what each head became and why, the controls.
#pragma once

#include "convert/convert.h"
#include "report/report.h"

namespace horner::convert {

report::Report make_report(const Result&, const nn::ModelConfig& teacher,
                           const std::vector<Sample>&, const std::string& command);

// The sentences of its summary. Differences are paired by validation sequence and have 95 %
// t-intervals. A model is ahead or behind only where p, with Holm's correction over the page, is
// below 0.05.
std::vector<std::string> findings(const Result&);

}  // namespace horner::convert

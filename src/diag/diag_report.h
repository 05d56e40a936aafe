// A diagnosis as a report: findings, the paper's figures, a heat map per metric.
#pragma once

#include "diag/findings.h"
#include "report/report.h"

namespace horner::diag {

struct About {
  std::string model, text, command, version;
};
report::Report make_report(const Diagnosis&, const std::optional<WhatIf>&, const About&);
report::Report make_report(const WhatIf&, const About&);  // of a diagnosis that was interrupted

// Sections of the paper's claims that claims.h sums up.
void add_sensitivity(report::Report&, const Diagnosis&);
void add_coverage(report::Report&, const Diagnosis&);
void add_growth(report::Report&, const Diagnosis&);
void add_jacobians(report::Report&, const Diagnosis&);

// All numbers.
nn::Json to_json(const Diagnosis&, const std::optional<WhatIf>&);
nn::Json to_json(const WhatIf&);

}  // namespace horner::diag

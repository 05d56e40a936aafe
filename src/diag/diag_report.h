// A diagnosis as a report: findings, the paper's figures, a heat map per metric.
#pragma once

#include "diag/findings.h"
#include "report/report.h"

namespace horner::diag {

struct About {
  std::string model, text, command, version;
};
report::Report make_report(const Diagnosis&, const std::optional<WhatIf>&, const About&);

// Adds sensitivity, coverage, growth and Lemma 2 (claims.h).
void add_claims(report::Report&, const Diagnosis&);

// All numbers.
nn::Json to_json(const Diagnosis&, const std::optional<WhatIf>&);

}  // namespace horner::diag

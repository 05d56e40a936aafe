// The findings of a diagnosis in words, each with its evidence and its rule.
#pragma once

#include <optional>

#include "diag/what_if.h"

namespace horner::diag {

struct Finding {
  std::string title, text, rule;
  std::vector<std::string> heads;  // "layer.head"
};
std::vector<Finding> findings(const Diagnosis&, const std::optional<WhatIf>&);

bool is_saturated(const Diagnosis&, const Head&);
bool is_dispersed(const Head&);
bool is_fragile(const Head&);
double share_at(const Diagnosis&, const Head&, int64_t N);  // mean N_s/N; NaN if not measured

// A number per head, for tables and heat maps.
struct Metric {
  const char *name, *about;
  double (*of)(const Diagnosis&, const Head&);
};
std::span<const Metric> metrics();

std::string number_text(double x);  // three digits

}  // namespace horner::diag

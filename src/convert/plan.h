// Which head takes which form under a budget of memory: plan.json, which a person can edit.
#pragma once

#include "convert/measure.h"

namespace horner::convert {

struct Choice {
  int64_t layer, head;
  std::string form, why;
};
struct Plan {
  int64_t near = 64, tokens = 8192;
  double budget = 0;  // bytes; 0: a number of heads was kept instead
  std::vector<Choice> heads;
  double bytes = 0, cache_bytes = 0;  // of the result and of the teacher, at `tokens` tokens
};
Json to_json(const Plan&);
Plan read_plan(const Json&, const nn::ModelConfig& teacher);  // throws if it does not fit the model

Assignment assignment_of(const Plan&, const nn::ModelConfig& teacher);

// Every head takes the form with the least error in the trials. Where that exceeds the budget,
// forms with smaller states replace it, the least increase of error per byte first. What the budget
// leaves goes to caches, in the order of the measure; or `keep` heads get one.
Plan make_plan(const Settings&, const nn::Model& teacher, const Measures&);

// Heads by descending measure: one of measure_table, "cost" (of trials), "random" or "uniform"
// (spread over the layers).
std::vector<size_t> ranked(const Measures&, const std::string& by, uint64_t seed);

}  // namespace horner::convert

// From a trained model to one with states in some heads and caches in others:
//   measure → trials → plan → transfer → heal → probes
// Each stage writes a file that the next one reads; a finished one is not run again.
#pragma once

#include <optional>

#include "convert/plan.h"
#include "convert/probes.h"

namespace horner::convert {

inline constexpr const char* kStages[] = {"measure", "plan", "transfer", "heal"};

// The models of the probes.
inline constexpr const char *kTeacher = "teacher", *kTransferred = "after transfer",
                            *kConverted = "converted", *kControl = "control (teacher, tuned alike)",
                            *kNear = "near keys only", *kState = "state only",
                            *kNone = "without these heads";

// The same prompt continued by both, the most likely tokens.
struct Sample {
  std::string prompt, teacher, converted;
};

// How well a measure predicts what converting a head costs: Spearman's rank correlation over heads,
// with a 95 % bootstrap interval.
struct Correlation {
  std::string measure;
  double rho, low, high;
};
std::vector<Correlation> correlations(const Measures&, uint64_t seed);

// The loss with `kept` heads as they are and the others as in the trials, chosen by a measure.
struct Kept {
  std::string by;
  std::vector<std::pair<int64_t, double>> losses;  // heads, loss
};

struct Result {
  Settings settings;
  Measures measures;
  Plan plan;
  std::vector<Kept> kept;                       // with --costs
  std::vector<double> transfer, heal, control;  // losses of steps
  Probes probes;
  int64_t tokens = 0;              // trained on
  std::optional<nn::Model> model;  // the converted one; not if it ended earlier
};

// Runs up to the stage `until`, with a plan that is given or made. Throws Stopped when interrupted.
Result convert(const Task&, const std::string& until, const std::optional<Plan>& given);

Json to_json(const Result&);

}  // namespace horner::convert

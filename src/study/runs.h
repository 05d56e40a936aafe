// Runs as their folders have them, and what belongs together: runs of a task, seeds of a variant.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "attn/spec.h"
#include "report/svg.h"
#include "train/settings.h"

namespace horner::study {

using train::Json;
using Points = std::vector<report::Point>;

struct RunData {
  std::filesystem::path folder;
  train::Settings settings;
  bool finished;
  int64_t step;  // the last one
  Json result;   // null unless finished
  Points loss, gradient, validation_loss, validation_accuracy;
  std::vector<double> entropy, separability;  // of each layer, the last measured
  std::vector<std::vector<double>> taylor;    // log_magnitudes of taylor.h, or empty
};

// Every run in these folders and below. The same run twice is taken once: the one that came
// further. Throws where there is none.
std::vector<RunData> read_runs(const std::vector<std::filesystem::path>&);

// Mean and standard deviation over seeds; NaN without values.
struct Spread {
  double mean, deviation;
  size_t n;
};
Spread spread(const std::vector<double>&);

// The seeds of a variant on a task.
struct Group {
  std::string name, about;
  std::string kind;  // of the variant: "Taylor", "linear kernels", …: what shares a colour
  int order = -1;    // of a series; -1: none
  bool centred = false;
  std::vector<const RunData*> runs;
  Spread loss, accuracy;  // at the last validation
  size_t diverged = 0;    // runs whose loss is no number, or as bad as at the beginning
};

struct TaskData {
  std::string name;
  double chance = 0;  // of a guess; 0 for text
  int64_t pairs = 0;  // of recall; 0 otherwise
  std::vector<Group> groups;
  const Group* softmax = nullptr;
};
// In order of first appearance; softmax first among a task's groups, then by kind and order.
std::vector<TaskData> by_task(const std::vector<RunData>&);

}  // namespace horner::study

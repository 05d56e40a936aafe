// Runs read from their folders, grouped by task and variant.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "attn/spec.h"
#include "report/svg.h"
#include "study/statistics.h"
#include "train/settings.h"

namespace horner::study {

using train::Json;
using Points = std::vector<report::Point>;

// A share of right answers from which on a task counts as solved.
inline constexpr double kSolved = 0.99;

struct AtLength {
  int64_t length;
  double loss, accuracy;
};

struct RunData {
  std::filesystem::path folder;
  train::Settings settings;
  bool finished;
  int64_t step;                   // the latest
  int64_t repeated = 0;           // lines of steps that are not after all earlier ones
  int64_t given_up = 0;           // the step at which the study gave it up; 0: it did not
  Json result;                    // null unless finished
  std::vector<AtLength> lengths;  // of the setting evaluate-lengths, if finished
  Points loss, gradient, validation_loss, validation_accuracy;
  std::vector<double> entropy, separability;  // per layer, the latest measurement
  std::vector<std::vector<double>> taylor;    // log_term_means of taylor.h, or empty
  Json heads;                                 // the content of heads.json (heads.h), or null
};
void read_result(const Json&, RunData&);  // the content of result.json, or null

// Every run below these folders, or in these files (numbers.h); of several copies the most
// advanced. Throws if there are none.
std::vector<RunData> read_runs(const std::vector<std::filesystem::path>&);

// Equal for two folders of the same run: the settings that affect the losses, without the paths of
// data, which may differ between machines, and without what may change on resume.
Json identity(const train::Settings&);

// Mean and standard deviation over seeds; NaN without values.
struct Spread {
  double mean, deviation;
  size_t n;
};
Spread spread(const std::vector<double>&);

// What a variant changes in softmax, in the order of tables and legends (kKinds in runs.cpp).
// clang-format off
enum class Kind { taylor, raw_taylor, centred_taylor, changed_taylor, gates, gates_and_norms, linear, linear_powers, no_sum, norms, weights, patterns, unknown, sums };
// clang-format on
struct KindWords {
  const char *name, *intro;  // in legends; before a list of its variants, or null
};
const KindWords& words(Kind);

// A learning rate of a variant, with all its seeds.
struct Tried {
  double rate;
  Spread loss, accuracy;
  bool chosen;
  size_t given_up = 0;  // runs
};

// The seeds of a variant on a task.
struct Group {
  std::string name, about;
  Kind kind = Kind::unknown;
  int order = -1;  // of the series; -1: none
  bool centred = false;
  std::vector<const RunData*> runs;  // those of the chosen learning rate
  std::vector<Tried> tried = {};     // if there are several
  Spread loss, accuracy;             // at the last validation
  struct Longer {
    int64_t length;
    Spread loss, accuracy;
    double least, most;  // accuracies over seeds
    size_t solved;       // seeds
  };
  std::vector<Longer> lengths = {};
  size_t diverged = 0;  // runs whose loss is not finite, or no better than at the start
};

// Two variants, each at its own rate, paired by seed: relative losses (0.01: 1 % higher), or
// differences of accuracies on tasks that have right answers.
struct Comparison {
  const Group *mine, *other;
  Interval change;
  int64_t length = 0;  // of the sequences; 0: that of training
  double p_holm = 1;   // corrected for all comparisons of the page
  bool shown() const { return p_holm < 0.05; }
};

struct TaskData {
  std::string name;  // of the task, and of the model where a study has several sizes
  std::string task = "", size = "";
  double chance = 0;  // accuracy of guessing; 0 for text
  int64_t pairs = 0;  // of recall; otherwise 0
  std::vector<Group> groups;
  const Group* softmax = nullptr;
  // With softmax, also at the longest of evaluate-lengths; of a centred series with the plain one.
  std::vector<Comparison> comparisons = {};

  const Comparison* find(const Group& mine, const Group* other, int64_t length = 0) const;
};
// Tasks in order of first appearance, one for each size of the model if a variant has several;
// their groups by kind and order, softmax first.
std::vector<TaskData> by_task(const std::vector<RunData>&);

}  // namespace horner::study

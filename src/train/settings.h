// Every setting of a training run, declared once in the table of settings.cpp: options, help, range
// checks and files all read it. The defaults are those of the struct.
#pragma once

#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace horner::train {

using Json = nlohmann::ordered_json;

struct Settings {
  std::string model = "tiny", attention, task = "text", data, validation;
  Json model_config = Json::object();
  int64_t steps = 1000, batch = 8, length = 512, micro_batch = 0;
  std::string shard = "none";
  double bucket = 25;
  int64_t context_parallel = 1;
  bool recompute = false;
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip = 1;
  bool decay_all = false;
  int64_t warmup = -1, decay_steps = 0;
  uint64_t seed = 0;
  std::string dtype = "float32", execution = "auto", device = "auto", backend = "auto";
  bool graph = true;
  int64_t evaluate_every = 250, evaluate_sequences = 64, checkpoint_every = 250, keep = 2;
  std::string evaluate_lengths;
  int64_t entropy_every = 100, threads = 0;
  std::string on_spike = "note", on_nan = "stop";
  double spike = 8;
  bool tensorboard = false;
};

// Numbers from `least` (excluded if `open`) to below `below`, or one of `choices`; default: any.
struct Range {
  double least = -INFINITY, below = INFINITY;
  bool open = false;
  std::vector<std::string> choices = {};
};
std::string range_text(const Range&);  // "at least 1"; "" if everything is accepted

// Whether a setting may change when a run is resumed. A schedule's may if the run has decay-steps:
// without, the learning rate reaches 0 at the last step.
enum class Change { never, schedule, always };

struct Setting {
  const char* name;
  std::variant<std::string Settings::*, int64_t Settings::*, uint64_t Settings::*,
               double Settings::*, bool Settings::*, Json Settings::*>
      at;
  Change on_resume;
  Range range;
  const char* help;
};
std::span<const Setting> setting_table();
const char* kind(const Setting&);  // of its values: "an integer"

Json to_json(const Settings&);

// Overwrites the settings that `j` names. Throws for an unknown name or a value of the wrong type;
// `where` is the source, for the error message.
void read_settings(Settings&, const Json& j, const std::string& where);

// Of "64,128", from the shortest. Throws unless it is a list of lengths, which may be empty.
std::vector<int64_t> evaluated_lengths(const Settings&);

// Throws unless every value is in its range.
void check_settings(const Settings&);

// The learning rate of a step, counted from 0: linear warmup over `warmup` steps, then linear decay
// to 0 at `decay_steps`.
double learning_rate(const Settings&, int64_t step);

}  // namespace horner::train

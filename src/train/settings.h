// Every setting of a training run, declared once (settings.cpp): options, files and what is printed
// come from the one table.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <variant>

namespace horner::train {

using Json = nlohmann::ordered_json;

struct Settings {
  std::string model = "tiny", attention, task = "text", data;
  Json model_config = Json::object();
  int64_t steps = 1000, batch = 8, length = 512, at_once = 0;
  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip = 1;
  int64_t warmup = -1, decay_steps = 0;
  uint64_t seed = 0;
  std::string dtype = "float32", execution = "auto", device = "auto", backend = "auto";
  bool graph = true;
  int64_t evaluate_every = 250, evaluate_sequences = 64, checkpoint_every = 250, keep = 2;
  int64_t entropy_every = 100, threads = 0;
  std::string on_spike = "note", on_nan = "stop";
  double spike = 8;
  bool tensorboard = false;
};

struct Setting {
  const char* name;
  std::variant<std::string Settings::*, int64_t Settings::*, uint64_t Settings::*,
               double Settings::*, bool Settings::*, Json Settings::*>
      at;
  bool fixed;  // a resumed run must have it as it was
  const char* about;
};
std::span<const Setting> setting_table();

Json to_json(const Settings&);

// Takes over what `j` has. Throws, naming the setting, for one that is not known or of a wrong
// kind; `where` is for the error.
void read_settings(Settings&, const Json& j, const std::string& where);

// Throws, saying what is possible, unless the values make sense.
void check_settings(const Settings&);

// The learning rate of a step, counted from 0: up to its height in `warmup` steps, then down to 0
// at `decay_steps`, both along a line.
double learning_rate(const Settings&, int64_t step);

}  // namespace horner::train

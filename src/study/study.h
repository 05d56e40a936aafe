// A study: a grid of runs, from a JSON file or a preset.
//   {"title": …, "attention": ["softmax", "taylor{1..10}", "linear_*"], "seeds": [0, 1, 2],
//    "settings": {any setting of horner train},
//    (in "attention", "linear_decay*3,softmax" or a list in the list: a pattern of layers)
//    "attention-settings": {"*gate*": {settings of the variants that match}},
//    "learning-rates": [1e-3, 3e-3], each for every variant: the report takes the best of each
//    "extend-rates": 2, how many rates may be added on a side where the best is at the edge
//    "give-up": {"after": 0.5, "behind": 0.2}, the rule of GiveUp; without it no run is given up
//    "diagnose": [512, 4096], lengths at which the heads of finished models are measured (heads.h)
//    "tasks": [{"task": "text", "settings": {…}, "attention": […], "seeds": […], "size": "wide"},
//              …]}: tasks that differ in their settings alone have a name of these, their folder
// The fields of a task override those of the study; the settings of a variant override both.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "attn/catalog.h"
#include "train/settings.h"

namespace horner::study {

using train::Json;

struct Run {
  std::string name;  // "recall/taylor2/seed0" or "…/lr0.003/seed0", also its folder
  std::filesystem::path folder;
  train::Settings settings;
  std::vector<int64_t> diagnose = {};  // lengths; empty: not diagnosed
};
// A run is given up when, at a validation after this share of its steps, its loss exceeds that of
// another learning rate of the same variant, task and seed by more than the share `behind`.
struct GiveUp {
  double after = 0, behind = 0;  // after = 0: never
};
struct Study {
  std::string title, about;
  size_t extend_rates = 2;
  GiveUp give_up = {};
  std::vector<Run> runs;  // seeds outermost, so that a study stopped early has every variant
};

// Throws, naming the field, for a missing, invalid or unknown one. `where` is for error messages.
Study read_study(const Json&, const std::string& where, const std::filesystem::path& out);

// The names of the variants that match the patterns, each once; a pattern may also have braces:
// "taylor{1..10}", "{l2,rms}". Commas make the layers of one model: "linear_decay*3,softmax".
std::vector<std::string> expand(const std::vector<std::string>& patterns);

struct Preset {
  const char *name, *about, *json;
};
std::vector<Preset> presets();

// The preset of that name, or the content of the file.
Json find_study(const std::string& preset_or_file);

}  // namespace horner::study

// A study: a grid of runs, from a JSON file or a preset.
//   {"title": …, "attention": ["softmax", "taylor{1..10}", "linear_*"], "seeds": [0, 1, 2],
//    "settings": {any of horner train},
//    "tasks": [{"task": "text", "settings": {…}, "attention": […], "seeds": […]}, …]}
// What a task names goes before what the study names.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "train/settings.h"

namespace horner::study {

using train::Json;

struct Run {
  std::string name;  // "recall/taylor2/seed0": its folder, too
  std::filesystem::path folder;
  train::Settings settings;
};
struct Study {
  std::string title;
  std::vector<Run> runs;  // seeds outermost: what is stopped early has every variant once
};

// Throws, naming the field, for what is missing, wrong or not known. `where` is for the error.
Study read_study(const Json&, const std::string& where, const std::filesystem::path& out);

// The variants that patterns name, each once: braces ("taylor{1..10}", "{l2,rms}"), globs over the
// listed variants, names.
std::vector<std::string> expand(const std::vector<std::string>& patterns);

struct Preset {
  const char *name, *about, *json;
};
std::vector<Preset> presets();

// The preset of that name, else the file.
Json find_study(const std::string& preset_or_file);

}  // namespace horner::study

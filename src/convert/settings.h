// Every setting of a conversion, and what its stages share.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "convert/forms.h"
#include "train/settings.h"
#include "train/source.h"

namespace horner::convert {

using files::Json;

struct Settings {
  std::string model, data, validation;
  int64_t near = 64;  // keys
  std::vector<std::string> forms = {"hedgehog64", "taylor1", "delta"};
  std::vector<int64_t> layers;  // to convert; empty: all
  double share = 0.125;         // the budget: of the teacher's cache at `tokens` tokens
  double bytes = 0;             // the budget itself, where it is given
  int64_t keep = -1;            // heads that keep their cache, instead of a budget
  int64_t tokens = 8192;
  std::string by = "kl";  // the measure by which heads are kept
  int64_t measure_tokens = 512, trial_steps = 40, transfer_steps = 100, heal_steps = 100;
  int64_t batch = 2, length = 512;
  double transfer_rate = 1e-2, heal_rate = 1e-4, distil = 0.5;
  int64_t rank = 16;  // of the changes to projections; 0: all weights learn
  int64_t evaluate_sequences = 16;
  bool control = true;
  bool objections = false;  // also near keys only, state only and no heads, tuned alike
  bool costs = false;       // of every head in every form
  uint64_t seed = 0;
  std::string device = "cpu", dtype = "float32";
};
Json to_json(const Settings&);

struct Hooks {
  std::function<bool()> stop = [] { return false; };
  std::function<void(const std::string&)> say = [](const std::string&) {};  // the current item
};
struct Stopped {};  // thrown once what was done is saved

// A stage calls it before each item: throws Stopped on demand, else says what comes.
inline void next(const Hooks& hooks, const std::string& what) {
  if (hooks.stop()) throw Stopped{};
  hooks.say(what);
}

// The teacher and its data.
struct Task {
  const Settings& s;
  const nn::Model& teacher;
  const train::Source& source;
  nn::Run run;
  std::filesystem::path folder;  // for files of stages
  const Hooks& hooks;
  int64_t begin = -1;  // the token that begins a text, where the tokenizer has one

  // Sequences first, first + 1, … of training or validation, [count, length], on the device. Their
  // first token is `begin`.
  at::Tensor sequences(uint64_t first, int64_t count, int64_t length,
                       train::Split = train::Split::train) const;
  std::vector<int64_t> layers() const;  // to convert
};

}  // namespace horner::convert

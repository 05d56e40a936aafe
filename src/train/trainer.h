// The training loop, its checkpoints and its files:
//   DIR/settings.json · metrics.jsonl · checkpoint-N/ · result.json at the end
#pragma once

#include <filesystem>
#include <functional>

#include "train/settings.h"
#include "train/source.h"
#include "train/start.h"

namespace horner::train {

struct Progress {
  int64_t step, steps;  // done, total
  double loss, norm, rate;
  double tokens_per_second, seconds_left;
  double share_of_peak;    // NaN unless Hooks::measure_peak
  double validation_loss;  // the latest; NaN before the first
};

// Callbacks of the caller.
struct Hooks {
  std::function<bool()> stop = [] { return false; };  // called after every step
  std::function<void(const Progress&)> progress = [](const Progress&) {};
  std::function<void(const std::string&)> say = [](const std::string&) {};  // a message
  // Called from another thread: another process of the run is dead, and this one must exit.
  std::function<void(const std::string&)> lost = {};
  bool measure_peak = false;  // of matrix products, after the first step, for share_of_peak
};

struct Outcome {
  bool finished;  // otherwise it was interrupted and can be resumed
  int64_t step;
  Json result;              // as in result.json
  bool terminated = false;  // interrupted by SIGTERM of a rank, of several
};

// Resuming continues from the newest checkpoint in `folder`; a finished run is left unchanged. Rank
// 0 holds the folder's lock. Nothing else is written before the first step has been computed.
// Throws if the folder is in use, or if the run cannot begin there (check_run of start.h).
Outcome train(const Settings&, const Source&, const std::filesystem::path& folder, Begin,
              const Hooks& = {});

}  // namespace horner::train

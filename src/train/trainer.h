// Train a model: the loop, its checkpoints and its files.
//   DIR/settings.json · metrics.jsonl · checkpoint-N/ · result.json when it is done
#pragma once

#include <filesystem>
#include <functional>

#include "train/settings.h"
#include "train/source.h"

namespace horner::train {

struct Progress {
  int64_t step, steps;  // done, and of all
  double loss, norm, rate;
  double tokens_per_second, share_of_peak, seconds_left;
  double validation_loss;  // the last; NaN before the first
};

// How whoever started it takes part.
struct Hooks {
  std::function<bool()> stop = [] { return false; };  // asked after every step
  std::function<void(const Progress&)> progress = [](const Progress&) {};
  std::function<void(const std::string&)> say = [](const std::string&) {};  // a line to read
  // From another thread: another process of the run is gone, and this one must end.
  std::function<void(const std::string&)> lost = {};
};

struct Outcome {
  bool finished;  // else it was asked to stop, and can be resumed
  int64_t step;
  Json result;  // as in result.json
};

// Goes on from the newest checkpoint in `folder` if there is one and `resume` is set; a run that is
// finished is left as it is. Throws where a run is there and `resume` is not set, or where it was
// made with other settings.
Outcome train(const Settings&, const Source&, const std::filesystem::path& folder, bool resume,
              const Hooks& = {});

}  // namespace horner::train

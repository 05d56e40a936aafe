// Everything a run needs to go on as if it had never stopped, in a folder that is there whole or
// not at all: the model as a Hugging Face folder, optimizer.safetensors, training.json.
#pragma once

#include <filesystem>
#include <optional>

#include "train/journal.h"
#include "train/optimizer.h"

namespace horner::train {

// What changes from step to step besides tensors.
struct Position {
  int64_t step = 0;  // steps done; the data goes on at sequence step * batch
  int64_t spikes = 0, skipped = 0;
  double seconds = 0;  // spent in steps
  Window losses, norms;
};

// The newest whole checkpoint of a run's folder.
std::optional<std::filesystem::path> newest_checkpoint(const std::filesystem::path& run);

// Written under a temporary name, synced, renamed; then all but the newest `keep` go.
void save_checkpoint(const std::filesystem::path& run, const nn::Model&, const Optimizer&,
                     const Position&, int64_t keep);

// Means, squares and counts into `o`, which was made from the checkpoint's model; random states
// into torch's generators.
Position load_checkpoint(const std::filesystem::path& checkpoint, Optimizer& o);

}  // namespace horner::train

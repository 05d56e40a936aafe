// Everything a run needs to resume exactly, in a folder that appears atomically: the model as a
// Hugging Face folder, optimizer.safetensors (or one part of it per rank, where the optimizer is
// sharded), training.json, and checksums.txt of all of them.
#pragma once

#include <filesystem>
#include <optional>

#include "train/comm.h"
#include "train/journal.h"
#include "train/optimizer.h"

namespace horner::train {

// The state of a run besides tensors.
struct Position {
  int64_t step = 0;  // steps done; the next sequence is step * batch
  int64_t spikes = 0, skipped = 0;
  double seconds = 0;  // spent in steps
  Window losses, norms;
};

// The newest complete checkpoint in a run's folder.
std::optional<std::filesystem::path> newest_checkpoint(const std::filesystem::path& run);

// The newest checkpoint whose files are what was written, and the newer ones with what is wrong.
struct Found {
  struct Damaged {
    std::filesystem::path checkpoint;
    std::string why;
  };
  std::optional<std::filesystem::path> whole;
  std::vector<Damaged> damaged;
};
Found find_checkpoint(const std::filesystem::path& run);

// Renames a damaged one to NAME.damaged, so that the run can write it again.
void set_aside(const std::filesystem::path& checkpoint);

int64_t step_of(const std::filesystem::path& checkpoint);  // by its name

std::filesystem::path checkpoint_path(const std::filesystem::path& run, int64_t step);

// Writes under a temporary name, syncs and renames; then removes all but the newest `keep`. With a
// group, every rank of it calls this and writes the pieces of its optimizer; all see the folder.
void save_checkpoint(const std::filesystem::path& run, const nn::Model&, const Optimizer&,
                     const Position&, int64_t keep, const Group& = Group());

// Restores the pieces and step count of `o`, which was made from the checkpoint's model, from the
// files of any number of ranks, and the states of torch's random generators.
Position load_checkpoint(const std::filesystem::path& checkpoint, Optimizer& o);

}  // namespace horner::train

// Ranks that share sequences (--context-parallel): of `world` ranks, every N in a row have one part
// each of the same sequences.
#pragma once

#include "attn/split.h"
#include "nn/config.h"
#include "train/comm.h"
#include "train/settings.h"

namespace horner::train {

struct Context {
  int parts = 1, part = 0;    // of a sequence, and this rank's
  int groups = 1, group = 0;  // of ranks that share sequences
};
// Throws unless `parts` divides the number of ranks.
Context context_of(const Ranks&, int64_t parts);

// Sequences of a rank per step, and per micro-batch. Throws unless the settings divide evenly.
struct Share {
  int64_t all, micro_batch;
};
Share share_of(const Settings&, const Context&);

// Connects the ranks that share sequences. The group must outlive the result.
attn::Split make_split(const Group&, const Context&);

// Throws unless what travels for each layer is the same on all ranks: what their devices can run
// decides it, too.
void check_travels(const Group&, const Settings&, const nn::ModelConfig&, at::Device);

}  // namespace horner::train

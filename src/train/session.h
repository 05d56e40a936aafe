// A run in memory: the model on its device, the tensors of a step, and the other ranks.
#pragma once

#include <filesystem>
#include <memory>

#include "train/batch.h"
#include "train/checkpoint.h"
#include "train/comm.h"
#include "train/context.h"
#include "train/graph.h"
#include "train/optimizer.h"

namespace horner::train {

struct Session {
  const Settings s;
  const Source source;
  at::Device device;
  Group group;
  Context context;
  std::unique_ptr<attn::Split> split;  // null: every rank has whole sequences
  nn::Model model;
  nn::Run run;
  Optimizer optimizer;
  GradientAverage average;         // unless there are shards
  std::unique_ptr<Shards> shards;  // null: every rank updates all weights
  Position at;
  StepNumbers numbers;
  at::Tensor tokens, targets, shares;   // [P, b, T], [P, b, T], [P], on the device
  std::shared_ptr<CapturedWork> graph;  // the step, once captured
  Batch first_batch;                    // of the step at which this process begins
  int64_t steps_here = 0;

  bool first() const { return group.ranks().rank == 0; }
};

struct Opening {
  const Settings& s;
  const Source& source;
  std::filesystem::path folder;                     // of the run
  std::optional<std::filesystem::path> checkpoint;  // to resume from, on rank 0
  Group group;
};
at::Device device_of(const Settings&, const Ranks&);
Session open_session(Opening);

// This rank's sequences of a step.
Batch step_batch(const Session&, int64_t step);

// Starts a step on a batch; on a GPU it may return before the step is done. A loss or gradient norm
// above its limit skips the update.
void start_step(Session&, const Batch&, double loss_limit, double norm_limit);

// Matrix products only, forward and backward: 6 per weight, and the two products of attention over
// the causal half of the scores.
double step_flops_per_token(const nn::Model&, int64_t T);

// Numbers that decoding keeps of a sequence of T tokens, in all layers: sums, or keys and values.
double state_numbers(const nn::ModelConfig&, int64_t T);

}  // namespace horner::train

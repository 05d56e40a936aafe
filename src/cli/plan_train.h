// horner plan --train and --model: private to the command plan.
#pragma once

#include "cli/options.h"

namespace horner::cli {

struct TrainingPlan {
  std::string model, attention, shard = "none";
  int64_t gpus = 1, context = 1, length = 512, batch = 1, micro_batches = 1;
  double memory = 141, bucket = 25;  // GB, MB
  std::vector<double> bandwidths;    // GB/s
  bool recompute = false, bfloat16 = false, json = false;
};

void add_training_options(CLI::App&, TrainingPlan&);
Outcome plan_training(const TrainingPlan&);

// What decoding with the model of a folder keeps; a KV cache in that dtype.
Outcome plan_model(const std::string& folder, const std::string& dtype, bool json);

}  // namespace horner::cli

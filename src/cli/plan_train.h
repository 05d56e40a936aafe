// horner plan --train: private to the command plan.
#pragma once

#include "cli/options.h"

namespace horner::cli {

struct TrainingPlan {
  std::string model = "tiny", attention, shard = "none";
  int64_t gpus = 1, context = 1, length = 512, batch = 1, micro_batches = 1;
  double memory = 141, bucket = 25;  // GB, MB
  std::vector<double> bandwidths;    // GB/s
  bool recompute = false, bfloat16 = false, json = false;
};

void add_training_options(CLI::App&, TrainingPlan&);
Outcome plan_training(const TrainingPlan&);

}  // namespace horner::cli

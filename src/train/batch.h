// The sequences of a step, validation, and measurements of a model's attention during training.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/model.h"
#include "train/settings.h"
#include "train/source.h"

namespace horner::train {

// P micro-batches of b sequences, on the CPU.
struct Batch {
  at::Tensor tokens, targets;   // [P, b, T], int64
  std::vector<int64_t> counts;  // [P], targets that are not -1
};

// Sequences first, …, first + count - 1. Throws if a token is not below V.
Batch make_batch(const Source&, Split, uint64_t first, int64_t count, int64_t micro_batch,
                 int64_t T, int64_t V);

// Tokens part * T / parts, … of every sequence.
Batch part_of(const Batch&, int part, int parts);

// Sums over the targets that are not -1.
struct Score {
  double loss = 0, right = 0, count = 0;
};
// Validation sequences first <= i < last, a micro-batch at a time; of sequences that ranks share,
// this rank's part.
Score evaluate(const nn::Model&, const nn::Run&, const Source&, const Settings&, int64_t first,
               int64_t last);

// Means over the rows of each layer's attention, of each part of one in order.
struct RowMeans {
  std::vector<double> entropy;  // in nats, from the statistics of the pass itself
  // nn::separable_share of the N largest weights for kMostQueries evenly spaced queries of the
  // first sequence: N = 16, or T / 4 for T < 64. NaN if weights may be negative.
  std::vector<double> separability;
};
inline constexpr int64_t kMostQueries = 32;
RowMeans row_means(const nn::Model&, const nn::Run&, const at::Tensor& tokens);

// The first layer whose attention output is not finite; -1: none.
int64_t first_broken_layer(const nn::Model&, const nn::Run&, const at::Tensor& tokens);

}  // namespace horner::train

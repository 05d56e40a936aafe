// The sequences of a step, and what a model makes of sequences it is not trained on.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/model.h"
#include "train/settings.h"
#include "train/source.h"

namespace horner::train {

// P parts of b sequences, one after the other; on the CPU.
struct Batch {
  at::Tensor tokens, targets;   // [P, b, T], int64
  std::vector<int64_t> counts;  // [P], targets that count
};

// `count` sequences from number `first` on, in parts of `at_once`. Throws for tokens that a
// vocabulary of V does not have.
Batch make_batch(const Source&, Split, uint64_t first, int64_t count, int64_t at_once, int64_t T,
                 int64_t V);

// Sums over the targets that count.
struct Score {
  double loss = 0, right = 0, count = 0;
};
// Sequences first <= i < last of the validation, `at_once` at a time.
Score evaluate(const nn::Model&, const nn::Run&, const Source&, const Settings&, int64_t first,
               int64_t last);

// Of the rows of each layer's attention, means.
struct RowMeans {
  std::vector<double> entropy;  // in nats, from the statistics of the pass itself
  // nn::separable_share of the N largest weights, in the first sequence's kMostQueries queries at
  // even steps: N = 16, or a quarter of a text below 64 tokens. NaN where weights are no shares.
  std::vector<double> separability;
};
inline constexpr int64_t kMostQueries = 32;
RowMeans row_means(const nn::Model&, const nn::Run&, const at::Tensor& tokens);

// The first layer whose attention gives no finite numbers; -1: none.
int64_t first_broken_layer(const nn::Model&, const nn::Run&, const at::Tensor& tokens);

}  // namespace horner::train

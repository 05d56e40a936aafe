// Rows of a layer's attention weights, one block of queries at a time: at most one [H, block, S]
// slice is in memory.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "attn/attend.h"

namespace horner::nn {

// A sampled query and the number of queries that it represents.
struct Query {
  int64_t t;
  double weight;
};
// Every query up to 1,024, then `each` evenly spaced queries per doubling.
std::vector<Query> sample_queries(int64_t T, int64_t each = 128);
// About `most` evenly spaced queries, each of which sees at least two tokens.
std::vector<Query> few_queries(int64_t T, int64_t most);

struct Rows {
  std::span<const Query> queries;     // R queries
  std::vector<int64_t> begin, count;  // [R], the tokens that each query sees
  at::Tensor scores;                  // [H, R, S], scaled; float32 (double for double)
  at::Tensor hidden;                  // [1, R, S]
  at::Tensor weights;                 // [H, R, S], 0 where hidden, rows sum to 1
  at::Tensor largest_product;         // [H, R], |q| max |k| over the keys seen, scaled
};

// c tanh(x / c) of scores x, where the spec caps them.
at::Tensor capped(const attn::Spec&, const at::Tensor& scores);

// Why the rows of a variant cannot be analysed; "" if they can.
std::string why_no_rows(const attn::Spec&);

// Calls `look` with each block in order.
void for_rows(const attn::Spec&, const attn::Inputs&, std::span<const Query>,
              const std::function<void(const Rows&)>& look);

// The weights of another normaliser on the same scores, each row divided by its sum. Learned scales
// that depend on the row's length are set so that their mean over the rows is 1.
at::Tensor weights_of(const attn::Spec&, const Rows&);

// The fraction of a row's N largest weights a that can be separated among points x, the values
// scaled to length 1: those with |a_i x_i - s| < min over the others of |a_j x_j - s|, where s is
// the sum of a_i x_i over the N (N_s / N of arXiv 2508.17821). values [H, S, E] -> [H, R], double;
// NaN if a row sees at most N tokens.
at::Tensor separable_share(const Rows&, const at::Tensor& weights, const at::Tensor& values,
                           int64_t N);

}  // namespace horner::nn

// Rows of attention weights of a layer, a block of queries at a time: never more than one
// [H, block, S] slice of them.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "attn/attend.h"

namespace horner::nn {

// A query that is measured, and for how many it stands.
struct Query {
  int64_t t;
  double weight;
};
// Every query up to 1,024; of each doubling beyond, `each` of them at even steps.
std::vector<Query> sample_queries(int64_t T, int64_t each = 128);
// About `most` of them at even steps, none of which sees a single token only.
std::vector<Query> few_queries(int64_t T, int64_t most);

struct Rows {
  std::span<const Query> queries;     // R of them
  std::vector<int64_t> begin, count;  // [R], the tokens that each sees
  at::Tensor scores;                  // [H, R, S], scaled; float32 (double for double)
  at::Tensor hidden;                  // [1, R, S]
  at::Tensor weights;                 // [H, R, S], 0 where hidden, rows sum to 1
  at::Tensor largest_product;         // [H, R], |q| max |k| over the keys seen, scaled
};

// Why the weights of a variant cannot be looked at in this way; "" when they can.
std::string why_no_rows(const attn::Spec&);

// Calls `look` with one block after the other, from the first query on.
void for_rows(const attn::Spec&, const attn::Inputs&, std::span<const Query>,
              const std::function<void(const Rows&)>& look);

// The weights of another normaliser on the same scores, its rows divided by their sums; the
// learned scales of a row's length are set so that their mean over the rows is 1.
at::Tensor weights_of(const attn::Spec&, const Rows&);

// How many of a row's N largest weights a can be told apart among points x, here the values at
// length 1: the share of them with |a_i x_i - s| < min over the others of |a_j x_j - s|, where s is
// the sum of a_i x_i over the N (N_s / N of arXiv 2508.17821). values [H, S, E] -> [H, R], double;
// NaN where a row sees no more than N tokens.
at::Tensor separable_share(const Rows&, const at::Tensor& weights, const at::Tensor& values,
                           int64_t N);

}  // namespace horner::nn

// The sums of polynomial weights of any order in linear time, in torch's operators and in double:
// for what has no kernels of its own on a GPU. Quadratic inside a chunk, monomials between chunks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "attn/plan.h"

namespace horner::attn::exec {

struct SeriesJob {
  Orders orders;
  double scale;
  at::Tensor seen;                      // [B, 1, T, 1], double: 1 for a key that is seen, else 0
  bool wanted = true;                   // the state after the tokens
  double most_bytes = kMostStateBytes;  // of the states that backward keeps
};
// All in double. share [B, G, T]: of the delta rule (stages.h), or undefined: u = v. logs [B, G,
// T]: of the gates, or undefined. centre [B, H, T, 1]: what the scores are less, for orders from 0
// on, or undefined. S: the sums before the tokens, or undefined. The k and v of keys that are not
// seen are 0, and so is their share.
struct SeriesTensors {
  at::Tensor q, k, v, share, logs, centre, S;  // [B, H, T, D], [B, G, T, D], [B, G, T, E]

  static auto fields(auto& x) {
    return std::array{&x.q, &x.k, &x.v, &x.share, &x.logs, &x.centre, &x.S};
  }
};
// N has W as its last column, S has z: [B, H, T, E + 1], [B, G, F, E + 1], features in the order of
// kernels/cpu/chunked/monomials.h; S is empty where it is not wanted.
struct SeriesResult {
  at::Tensor N, S;
  at::Tensor states;  // before each chunk, or before some; undefined for one chunk without a state

  static auto outputs(auto& r) { return std::array{&r.N, &r.S}; }
  static auto saved(auto& r) { return std::array{&r.states}; }
};
SeriesResult series_sums(const SeriesJob&, const SeriesTensors&);  // differentiable

// Tokens of a chunk: as much work inside chunks as for their states of `state` numbers.
int64_t series_chunk(int64_t heads, int64_t state);

}  // namespace horner::attn::exec

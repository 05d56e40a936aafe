// Token-by-token generation: each layer keeps a recurrent state if its variant has one, a KV cache
// otherwise.
#pragma once

#include <functional>

#include "nn/model.h"

namespace horner::nn {

struct Sampling {
  double temperature = 1;  // 0: the most likely token
  int64_t top_k = 0;       // sample from the k most likely tokens; 0: from all
  double top_p = 1;        // sample from the most likely tokens with this total probability
  uint64_t seed = 0;
};

struct Generated {
  std::vector<int64_t> tokens;
  double prompt_seconds = 0, seconds = 0;  // prefill; all tokens after the first
  int64_t state_bytes = 0;
};

// Generates up to `count` tokens after the prompt and passes each to `use`. Stops when `use`
// returns false, or after a token that ends a text.
Generated generate(const Model&, const std::vector<int64_t>& prompt, int64_t count, const Sampling&,
                   const std::function<bool(int64_t)>& use);

}  // namespace horner::nn

// Text from a model, one token after the other: an RNN's state where its variant has one, a cache
// of keys and values where it has none.
#pragma once

#include <functional>

#include "nn/model.h"

namespace horner::nn {

struct Sampling {
  double temperature = 1;  // 0: the likeliest token
  int64_t top_k = 0;       // among so many of the likeliest; 0: all
  double top_p = 1;        // among the likeliest that together have this probability
  uint64_t seed = 0;
};

struct Generated {
  std::vector<int64_t> tokens;
  double prompt_seconds = 0, seconds = 0;  // of the prompt; of the tokens after the first
  int64_t state_bytes = 0;
};

// Up to `count` tokens after the prompt. `use` gets each; generation ends where it says false, or
// at a token that ends a text.
Generated generate(const Model&, const std::vector<int64_t>& prompt, int64_t count, const Sampling&,
                   const std::function<bool(int64_t)>& use);

}  // namespace horner::nn

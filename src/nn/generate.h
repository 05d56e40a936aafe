// Token-by-token generation: each layer keeps a recurrent state if its variant has one, a KV cache
// otherwise. Prompts are read one by one, their common beginning once; their texts go on together.
#pragma once

#include <functional>

#include "nn/model.h"

namespace horner::nn {

struct Sampling {
  double temperature = 1;  // 0: the most likely token
  int64_t top_k = 0;       // sample from the k most likely tokens; 0: from all
  double top_p = 1;        // sample from the most likely tokens with this total probability
  uint64_t seed = 0;       // of the first prompt; that of each other is one more
};

struct Prompt {
  std::vector<int64_t> tokens;
  int64_t count;  // of new tokens, at most
};

struct Generated {
  std::vector<int64_t> tokens = {};
  bool ended = false;     // the last token is one that ends a text
  bool finished = false;  // no more tokens come: it ended, or has `count`
};

struct Texts {
  std::vector<Generated> each;             // of each prompt
  int64_t shared_tokens = 0;               // at the beginning of all prompts, read once
  double prompt_seconds = 0, seconds = 0;  // prefill and first tokens; all other tokens
  int64_t state_bytes = 0;                 // at most

  double rate() const;  // other tokens per second
};

// Generates texts for `most` prompts at a time, in order. `use` sees each text with each of its new
// tokens; if it returns false, all texts end. A model in which texts of different lengths cannot be
// joined (join.h) takes prompts of equal lengths together, the shortest first.
Texts generate(const Model&, const std::vector<Prompt>&, const Sampling&, int64_t most,
               const std::function<bool(size_t prompt, const Generated&)>& use);

}  // namespace horner::nn

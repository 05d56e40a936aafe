// A model some of whose heads give what the same heads of another model give for the same queries,
// keys and values: what converting these heads alone does to it.
#pragma once

#include <span>

#include "diag/layers.h"
#include "nn/model.h"

namespace horner::convert {

using diag::Heads;

struct Swap {
  const nn::Model* with;  // null: the mean over the tokens of what the head itself gives
  Heads heads;
};

// nn::hidden of tokens [B, T] with some heads swapped. No gradients.
at::Tensor hidden_with(const nn::Model&, const at::Tensor& tokens, std::span<const Swap>,
                       const nn::Run& = {});

// What a swap does to predictions of tokens [B, T]: mean cross-entropy of the next tokens from
// position `from` on, and the mean KL divergence from the unchanged model, whose hidden rows are
// `own` [B, T, C]; 0 where that is undefined.
struct Effect {
  double loss = 0, kl = 0;
};
Effect effect_of(const nn::Model&, const at::Tensor& tokens, const at::Tensor& hidden,
                 const at::Tensor& own = {}, int64_t from = 0);

}  // namespace horner::convert

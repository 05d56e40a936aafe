// The same logits through another normaliser: the effect on rows, and on the model's loss if some
// or all of its heads are switched.
#pragma once

#include <optional>
#include <span>

#include "attn/catalog.h"
#include "diag/diagnose.h"

namespace horner::diag {

// (layer, head).
using Heads = std::vector<std::pair<int64_t, int64_t>>;

// The variant with the layer's own features, scale and mask.
attn::Spec switched(const attn::Spec& layer, const attn::Spec& variant);

struct Switch {
  attn::Spec variant;
  Heads heads;
};
// Mean cross-entropy of tokens [T] with some heads switched. Learned length scales of a variant are
// set so that their mean over the text is 1.
double loss(const nn::Model&, const at::Tensor& tokens, std::span<const Switch>);
Heads all_heads(const nn::Model&);

// Means over heads and a few queries under the variant.
struct RowEffect {
  double entropy_ratio = 0;
  double share = 0;           // separable share of the top 5; NaN if weights may be negative
  double sensitivity = 0;     // |w(x + eps v) - w(x)| / eps, eps = 0.1
  std::vector<double> moved;  // per head: relative change of its output
};

struct Effect {
  std::string name;
  RowEffect rows;
  double all, half, saturated;  // loss with all heads switched, the least affected half, the
                                // quarter with the least separable top 20
};
struct Truncated {
  bool renormalised;
  std::vector<std::pair<int64_t, double>> losses;  // N, loss with every head truncated to its top N
  int64_t within_1 = -1, within_5 = -1;            // least N that costs at most 1 %, 5 %
};
// How many of its largest weights a head needs, the rest deleted: the least N of a grid in which
// each is two fifths larger than the previous one. Index 0: at most 1 % more loss, 1: at most 5 %.
struct HeadTop {
  int64_t layer, head;
  int64_t alone[2];     // only this head truncated
  int64_t together[2];  // all heads truncated, each to the least N whose output error is at most a
                        // level common to all
};
struct Tops {
  std::vector<HeadTop> heads;
  double level[2], loss[2];  // of `together`: the largest allowed level, and its loss
};
struct WhatIf {
  int64_t tokens;
  double loss;
  std::vector<Effect> normalisers;
  std::vector<Effect> plain, centred;  // Taylor orders 1, 2, …
  std::vector<Truncated> truncated;
  std::optional<Tops> tops;
};
struct WhatIfAsked {
  std::vector<std::string> normalisers;  // variants; empty: normalisers_of(length)
  int orders = 20;
  bool truncations = true;
};
std::vector<std::string> normalisers_of(int64_t length);
Truncated truncate(const nn::Model&, const at::Tensor& tokens, double base, bool renormalise,
                   const Say&);
Tops tops_of_heads(const nn::Model&, const at::Tensor& tokens, double base, const Say&);
WhatIf what_if(const nn::Model&, const at::Tensor& tokens, const WhatIfAsked&, const Say& = {});

}  // namespace horner::diag

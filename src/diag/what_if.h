// The same logits through another normaliser: the effect on the model's loss if some or all of its
// heads are switched, and on rows. Losses are compared with that of the model's own operator.
#pragma once

#include <cmath>
#include <optional>
#include <span>

#include "attn/catalog.h"
#include "diag/diagnose.h"
#include "diag/layers.h"

namespace horner::diag {

// The variant with the layer's own features, scale and mask.
attn::Spec switched(const attn::Spec& layer, const attn::Spec& variant);

struct Switch {
  attn::Spec variant;
  Heads heads;
};
// Heads that keep the N largest of their own weights; the rest is deleted, and with `renormalise`
// the sums are over the N as well.
struct Cut {
  int64_t N;
  bool renormalise;
  Heads heads;
};
// Mean cross-entropy of tokens [T] with some heads switched or cut. Learned length scales of a
// variant are set so that their mean over the text is 1. Throws for heads without rows (layers.h).
double loss(const nn::Model&, const at::Tensor& tokens, std::span<const Switch>,
            std::span<const Cut> = {});

// Means over heads and a few queries under the variant; NaN until they are measured.
struct RowEffect {
  double entropy_ratio = NAN;
  double share = NAN;         // separable share of the top 5; NaN if weights may be negative
  double sensitivity = NAN;   // |w(x + eps v) - w(x)| / eps, eps = 0.1
  std::vector<double> moved;  // per head: relative change of its output
};

struct Effect {
  std::string name;
  double all;  // loss with all heads switched
  RowEffect rows = {};
  double half = NAN, saturated = NAN;  // with the least affected half switched, and the quarter
                                       // with the least separable top 20; NaN if not measured
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
  int64_t tokens = 0;
  std::string attention;  // the model's own operator
  double loss = NAN;      // with it
  bool whole = false;     // nothing that was asked for is missing
  std::vector<Effect> normalisers;
  std::vector<Effect> plain, centred;  // Taylor orders 1, 2, …
  std::vector<Truncated> truncated;
  std::optional<Tops> tops;
};
struct WhatIfAsked {
  std::vector<std::string> normalisers;  // variants; empty: normalisers_of(length, attention)
  int orders = 20;
  bool truncations = true;
  bool per_head = false;  // also the effects on rows, on some of the heads, and each head's N
};
std::vector<std::string> normalisers_of(int64_t length, const std::string& attention);
Truncated truncate(const nn::Model&, const at::Tensor& tokens, double base, bool renormalise,
                   const Say&);
Tops tops_of_heads(const nn::Model&, const at::Tensor& tokens, double base, const Say&);

// One forward pass or a few for each number, into `out` as they come: `say` may throw to stop.
// `done` sees each effect of a switch of all heads.
void losses_of_model(const nn::Model&, const at::Tensor& tokens, const WhatIfAsked&, WhatIf& out,
                     const Say& = {}, const std::function<void(const Effect&)>& done = {});
// What needs many more: rows, parts of the heads, and each head alone.
void losses_of_heads(const nn::Model&, const at::Tensor& tokens, WhatIf& out, const Say& = {});

}  // namespace horner::diag

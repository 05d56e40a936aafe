// Run an attention operator.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <string_view>

#include "attn/spec.h"

namespace horner::attn {

// B batch, H heads, G key/value heads (H is a multiple of G), T queries, S keys, D head dimension,
// E value dimension. inputs.cpp lists the stages that need an input; otherwise it is undefined.
struct Inputs {
  at::Tensor q;                 // [B, H, T, D]
  at::Tensor k;                 // [B, G, S, D]
  at::Tensor v;                 // [B, G, S, E]
  at::Tensor decay;             // [B, G, S], the log of each token's gate
  at::Tensor slope;             // [G], of HeadSlope
  at::Tensor channel_decay;     // [B, G, S, D], the log of the gate of each token's channels
  at::Tensor input_gate;        // [B, G, S], in (0, 1)
  at::Tensor beta;              // [B, G, S], in (0, 1): how far Delta corrects
  at::Tensor denominator_gate;  // [B, G, S], the log of each token's share of Z
  at::Tensor sink;              // [H], the log of what Sum adds
  at::Tensor output_gate;       // [B, H, T], in (0, 1); [B, H, T, E] with channel_gates
  at::Tensor post_gate;         // likewise
  at::Tensor length_scale;      // [H], s_h of LogLength
  at::Tensor log_power;         // [H, 3], delta, beta and gamma of LogPower
  at::Tensor count_exponent;    // [G], m_h of CountPower
  at::Tensor near_share;        // [H], before a sigmoid: the largest weight of a near key
  at::Tensor norm_weight;       // [E]
  at::Tensor norm_bias;         // [E]
  at::Tensor query_projection;  // [H, D, F], of Project and Hedgehog
  at::Tensor key_projection;    // [G, D, F]
  at::Tensor bias;              // [B or 1, H or 1, T, S], what is added to each score
  at::Tensor prefix;            // [B], int: how many keys all queries see
  at::Tensor keep;              // [B, S], bool: false hides a key (padding)
  at::Tensor cu_seqlens;        // [n + 1], int: the first token of each packed sequence, then T
  at::Tensor cu_seqlens_k;      // [n + 1], likewise of the keys, where they are others: up to S
  at::Tensor seed;              // [1], int64: of dropout
};

// Statistics of the weights of each row, from a = |w decay| over the keys that it sees, A = sum a.
struct Statistics {
  at::Tensor entropy;         // -sum a/A log(a/A)
  at::Tensor largest;         // the largest a/A
  at::Tensor first;           // a/A of the row's first key: the mass of an attention sink
  at::Tensor negative;        // the sum of a/A over negative weights
  at::Tensor log_sum;         // log W, of weights exp
  bool only_log_sum = false;  // leaves the others out
};  // [B, H, T] each, float32 or wider, without gradients; 0 for a row without weights

// One way to run a Spec.
struct Execution {
  std::string_view name, about;
  std::string (*why_not)(const Spec&, const Inputs&);  // "" when it can run
  // [B, H, T, E], differentiable; writes the statistics of the same pass unless null.
  at::Tensor (*run)(const Spec&, const Inputs&, Statistics*);
  bool statistics = true;  // whether it supports them
  // The approximate number of multiplications of a forward pass, or null.
  double (*work)(const Spec&, const Inputs&) = nullptr;
  // The bytes that attend_kept() needs, at most. Sizes may be symbolic. 0 or null: none helps.
  c10::SymInt (*kept)(const Spec&, const Inputs&) = nullptr;
};

std::span<const Execution* const> executions();     // best first
const Execution& execution(std::string_view name);  // throws with the possible names

// The execution for these inputs, with statistics if required: the first that can run, or a later
// one that takes less work. Throws with every reason if none can run.
const Execution& choose(const Spec&, const Inputs&, std::string_view execution = "auto",
                        bool statistics = false);

// The same after check_inputs(); null where there is no key, for any name of an execution.
const Execution* checked(const Spec&, const Inputs&, std::string_view execution, bool statistics,
                         std::string_view variant = {});

// [B, H, T, E], in the dtype of q.
at::Tensor attend(const Spec&, const Inputs&, std::string_view execution = "auto",
                  Statistics* = nullptr);

// The same with gradients of every order, and of batches of gradients: a backward pass of these
// kinds runs `reference`, and a warning says so. Keeps the inputs until backward. Messages name
// `variant`.
at::Tensor attend_again(const Spec&, const Inputs&, std::string_view execution,
                        Statistics* = nullptr, std::string_view variant = {});

// The same for a graph whose forward and backward are two functions of tensors (torch.compile):
// what backward needs of forward is written to `kept`, bytes on the device of q, or, if that is
// `filled`, read from there instead of computed. `kept` without the room for it is not used.
at::Tensor attend_kept(const Spec&, const Inputs&, std::string_view execution, Statistics*,
                       std::string_view variant, const at::Tensor& kept, bool filled);

}  // namespace horner::attn

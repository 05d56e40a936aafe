// The state of a stream of tokens, one interface for every variant: sums of fixed size (carry.h)
// and a buffer of the newest tokens where the weight has a finite state, a KV cache where it has
// none.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "attn/attend.h"
#include "attn/carry.h"
#include "attn/plan.h"

namespace horner::attn {

// [B, H, T, E] of tokens that follow `before`, in linear time; writes the sums after them to
// `after`, unless that is null. Gradients flow through all of it. For a variant with a finite
// state.
at::Tensor attend_from(const Spec&, const Inputs&, const Carry& before, Carry* after);

struct State {
  Spec spec;
  StateShape shape;
  at::ScalarType dtype;  // of the inputs
  bool finite;
  int64_t tokens = 0;  // so far
  Carry carry;         // only count and gates where the state is not finite
  // The `held` most recent tokens, in [B, G, room, ..]: those not folded into a finite state yet,
  // or the KV cache. While single tokens come, the last of them are the near keys, which `carry`
  // does not have then.
  int64_t room, held = 0;
  Inputs recent;
  at::Tensor decay_sums;  // [B, G, room], double: running sums of the log gates
  at::Tensor given_k;     // [B, G, room, D]: keys before their features, which near ones are
};

// An empty state. `buffer`: how many tokens are folded into a finite state together; 0 keeps a KV
// cache instead, as does a GPU for sums in double. Throws if the state is too large (plan.h).
inline constexpr int64_t kWaiting = 64;
State make_state(const Spec&, const StateShape&, at::ScalarType = at::kFloat,
                 int64_t buffer = kWaiting, at::Device = at::kCPU);

// Adds T tokens and returns their results [B, H, T, E]: many for prefill, one for decoding. The
// same as attending to all tokens so far. Without gradients.
at::Tensor step(State&, const Inputs&);

// Folds the buffered tokens into the sums.
void flush(State&);

// Appends the tokens of `later` to those of `state`: the sums add.
void merge(State& state, const State& later);

// As if a stream had `tokens` tokens, by repeating those so far: for measurements. Sums stay as they
// are.
void repeat(State&, int64_t tokens);

// Every tensor that a state may hold, by name; the batch is the first dimension of each.
std::vector<std::pair<std::string, at::Tensor*>> tensors_of(State&);

int64_t bytes(const State&);  // in use now

void save(const State&, const std::filesystem::path&);  // a safetensors file
State load_state(const std::filesystem::path&);

}  // namespace horner::attn

// What a stream of tokens has left behind, one interface for every variant: a state of fixed size
// where its weight has one, with the newest tokens waiting beside it, and all keys and values where
// it has none.
//   S_t = g_t S_{t-1} + phi(k_t) v_t^T,  z_t = g_t z_{t-1} + phi(k_t),  N_t = phi(q_t) S_t
#pragma once

#include <filesystem>

#include "attn/attend.h"
#include "attn/plan.h"

namespace horner::attn {

// Sums over the keys of a stream; undefined tensors at its beginning. E is padded to a multiple of
// 16; S and z are float32, or double where plan.h's sums_in_double says so and for double inputs.
struct Carry {
  at::Tensor S;      // [B, G, F, E]: of phi(k) v^T
  at::Tensor z;      // [B, G, F]: of phi(k)
  at::Tensor count;  // [B], double: the keys seen
  at::Tensor keys;   // [B, G, D], double: of the keys; of centred rows
  at::Tensor gates;  // [B, G], double: of e^denominator_gate; of CumulativeGate
  at::Tensor decay;  // [B, G], double: of the log gates
};

// [B, H, T, E] of tokens that follow `before`, in linear time; what they leave behind in `after`,
// unless that is null. Gradients flow through all of it. For a variant with a finite state.
at::Tensor attend_from(const Spec&, const Inputs&, const Carry& before, Carry* after);

struct State {
  Spec spec;
  StateShape shape;
  at::ScalarType dtype;  // of the inputs
  bool finite;
  int64_t tokens = 0;  // taken in
  Carry carry;         // where it is not finite: count and gates alone
  // Recent tokens [B, G, room, ..] of which `held` are there: with a finite state those that wait
  // to be folded into it, else all of them.
  int64_t room, held = 0;
  Inputs recent;
  at::Tensor fades;  // [B, G, room], double: running sums of the log gates
};

// Empty. `buffer`: how many tokens wait to be folded into a finite state together; 0: none is ever,
// all keys and values are kept, as they are on a GPU for sums in double. Throws, with its size,
// where a state is too large (plan.h).
inline constexpr int64_t kWaiting = 64;
State make_state(const Spec&, const StateShape&, at::ScalarType = at::kFloat,
                 int64_t buffer = kWaiting, at::Device = at::kCPU);

// Takes in T tokens and gives their results [B, H, T, E]: many at once for a prompt, one when
// decoding. The same as attending to all tokens so far. Without gradients.
at::Tensor step(State&, const Inputs&);

// Folds what waits into the sums.
void flush(State&);

// As if the tokens of `later` had followed those of `state`: the sums add.
void merge(State& state, const State& later);

int64_t bytes(const State&);  // that it holds now

void save(const State&, const std::filesystem::path&);  // a safetensors file
State load_state(const std::filesystem::path&);

}  // namespace horner::attn

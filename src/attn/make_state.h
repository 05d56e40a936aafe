// What a state holds, and an empty one.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attn/attend.h"
#include "attn/carry.h"
#include "attn/plan.h"

namespace horner::attn {

struct State {
  Spec spec;
  StateShape shape;
  at::ScalarType dtype;  // of the inputs
  bool finite;
  at::ScalarType kept = at::kFloat;  // dtype of the keys and values in a KV cache
  int64_t tokens = 0;                // so far
  Carry carry;                       // only count, gates and keys where the state is not finite
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

// Every tensor that a state may hold, by name; the batch is the first dimension of each.
std::vector<std::pair<std::string, at::Tensor*>> tensors_of(State&);

// The state that had these tensors, by name, and numbers. Throws unless they fit each other, saying
// where they are `from`.
struct StateNumbers {
  int64_t tokens, room, held;
};
State state_of(const Spec&, const StateShape&, at::ScalarType, const StateNumbers&,
               const std::map<std::string, at::Tensor>&, const std::string& from);

// Throws unless both have the same variant, dtype and device.
void check_alike(const char* verb, const State&, const State&);

at::ScalarType sums_dtype(const State&);
int64_t key_channels(const State&);  // of the recent keys
int64_t near_keys(const Spec&);      // n of near=window(n), else 0
// How many keys the mask shows the newest query: the last ones, and the first of a streaming mask.
int64_t seen_by_newest(const State&);
int64_t padded_size(int64_t channels);
// Whether a KV cache holds values after the delta rule has corrected them, without its gates.
bool caches_corrected(const Spec&);
// Of the keys and values in a KV cache: as they are given, where they are bfloat16, else as sums.
at::ScalarType cache_dtype(const Spec&, at::ScalarType of_inputs);

}  // namespace horner::attn

// States of several streams as one, and parts of it: a batch whose streams begin alone, go on
// together and end one by one.
#pragma once

#include <string>
#include <vector>

#include "attn/make_state.h"

namespace horner::attn {

// A copy that shares no memory: steps of either leave the other as it is.
State snapshot(const State&);

// A copy with these rows of the batch, in this order; rows [n], int32 or int64. One may repeat.
State select(const State&, const at::Tensor& rows);

// The streams of all states as the rows of one batch, in this order; shares no memory. A step then
// gives each row what its own state would give. The streams may have different numbers of tokens:
// KV caches end at the same place, with hidden keys before the shorter ones, and `tokens` is that
// of the longest. To merge() these hidden keys are tokens.
State joined(const std::vector<State>&);

// "" where streams of different numbers of tokens can be joined, else the reason.
std::string why_not_joined(const Spec&);

}  // namespace horner::attn

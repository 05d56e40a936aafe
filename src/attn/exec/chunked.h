// Attention through a state: what the executions `chunked` and `recurrent` and attn/state share.
#pragma once

#include "attn/attend.h"
#include "attn/carry.h"
#include "attn/exec/sums.h"

namespace horner::attn::exec {

// float32 up to the order at which its sums are as accurate as `reference`; double above it, and
// for double.
at::ScalarType sums_dtype(const Spec&, at::ScalarType of_inputs);

// From the shape alone: the number of threads does not change the bits of the result.
Cut cut(const Spec&, const Inputs&);

// [B, H, T, E], continuing from the state `before` and leaving the next state in `after`, unless
// null. Gradients flow through all of them. `in_place`: without gradients, `after` may reuse the
// memory of `before`.
at::Tensor attend_in_chunks(const Spec&, const Inputs&, const Cut&, const Carry* before = nullptr,
                            Carry* after = nullptr, bool in_place = false);

// How many tokens run at a time, one piece after another through the state: the delta rule, the
// gates of channels and near keys take dozens of tensors of the size of a piece. All, for others.
int64_t piece_tokens(const Spec&, const Inputs&);

// "" when there is a state for these inputs, and it fits in memory.
std::string why_no_stream(const Spec&, const Inputs&);
// The same for an execution, which must be as accurate as `reference` in the same dtype: no sums
// are wider than double.
std::string why_no_sums(const Spec&, const Inputs&);

}  // namespace horner::attn::exec

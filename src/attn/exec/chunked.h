// Attention through a state: what the executions `chunked` and `recurrent` and attn/state share.
#pragma once

#include "attn/state.h"

namespace horner::attn::exec {

// How the tokens are cut: chunks of C tokens, in segments of `length` tokens that threads share.
struct Cut {
  int C;
  int64_t segments, length;
};

// float32 up to the order where its sums hold what `reference` does, double above and for double.
at::ScalarType sums_dtype(const Spec&, at::ScalarType of_inputs);

// By the shape alone: the same bits whatever the number of threads.
Cut cut(const Spec&, const Inputs&);

// [B, H, T, E]; from `before` on, unless that is null; what is left behind in `after`, unless that
// is null. Gradients flow through all of them. `in_place`: without gradients, the sums of `before`
// may become those of `after`.
at::Tensor attend_in_chunks(const Spec&, const Inputs&, const Cut&, const Carry* before = nullptr,
                            Carry* after = nullptr, bool in_place = false);

// "" when there is a state for these inputs, and it fits in memory.
std::string why_no_stream(const Spec&, const Inputs&);
// The same for an execution, which is held to what `reference` is in the same dtype: double has no
// wider sums.
std::string why_no_sums(const Spec&, const Inputs&);

}  // namespace horner::attn::exec

// Attention through a state: shared by the executions `chunked` and `recurrent` and by attn/state.
#pragma once

#include "attn/attend.h"
#include "attn/carry.h"

namespace horner::attn::exec {

// How tokens are divided: chunks of C tokens, in segments of `length` tokens, the threads' tasks.
struct Cut {
  int C;
  int64_t segments, length;
};

// float32 for float32 and 16-bit inputs where that is accurate enough (plan.h), else double.
at::ScalarType sums_dtype(const Spec&, at::ScalarType of_inputs);

// From the shape alone, so that results do not depend on the number of threads.
Cut cut(const Spec&, const Inputs&);

// [B, H, T, E]; continues from `before` and writes the state after the last token to `after`, unless
// these are null. Gradients flow through all of them. `in_place`: without gradients, the sums of
// `after` may reuse the memory of `before`.
at::Tensor attend_in_chunks(const Spec&, const Inputs&, const Cut&, const Carry* before = nullptr,
                            Carry* after = nullptr, bool in_place = false);

// "" when there is a state for these inputs and it fits in memory.
std::string why_no_stream(const Spec&, const Inputs&);
// The same for an execution, whose sums have to be more accurate than its inputs: not for double.
std::string why_no_sums(const Spec&, const Inputs&);

}  // namespace horner::attn::exec

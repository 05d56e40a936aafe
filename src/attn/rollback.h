// Back to an earlier state of a stream, bit for bit: of guessed tokens that are refused, or where
// several texts have one beginning.
#pragma once

#include "attn/state.h"

namespace horner::attn {

struct Mark {
  State state;  // shares what later tokens do not change
};

// Where `undo` returns to from at most n tokens later, any number of times. Copies a finite state;
// of a KV cache only counts and sums, because tokens are appended behind it.
Mark mark(State&, int64_t n);
void undo(State&, const Mark&);

}  // namespace horner::attn

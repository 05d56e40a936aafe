// Back to an earlier state of a stream, bit for bit: where guessed tokens are refused. For one
// stream at a time, which shares the memory of its KV cache with its marks: an undo ends later
// marks. Streams that go on side by side are snapshots (join.h).
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

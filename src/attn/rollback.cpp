#include "attn/rollback.h"

#include <ATen/ATen.h>

namespace horner::attn {

static State copied(const State& s) {
  State copy = s;
  for (const auto& [name, x] : tensors_of(copy)) {
    // A NaN among the gates of a token changes the running sums before it.
    const bool only_grows = !s.finite && name.starts_with("recent.") && x != &copy.decay_sums;
    if (x->defined() && !only_grows) *x = x->clone();
  }
  return copy;
}

Mark mark(State& s, int64_t n) {
  reserve(s, n);
  return {copied(s)};
}

void undo(State& s, const Mark& m) {
  s = copied(m.state);
}

}  // namespace horner::attn

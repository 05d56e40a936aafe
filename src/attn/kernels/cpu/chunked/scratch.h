// Memory of a task, given out piece by piece.
#pragma once

#include <cstdint>

namespace horner::attn::kernels {

template <class R>
struct Scratch {
  R* next;           // null: nothing is given, and what would be needed is counted
  int64_t used = 0;  // numbers

  R* take(int64_t n) {
    const int64_t whole = (n + 15) / 16 * 16;
    R* piece = next;
    if (next) next += whole;
    used += whole;
    return piece;
  }
};

}  // namespace horner::attn::kernels

// Allocates the buffers of a task from one piece of memory.
#pragma once

#include <cstdint>

namespace horner::attn::kernels {

template <class R>
struct Scratch {
  R* next;           // null: only count what is needed
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

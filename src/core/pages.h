// Keeps freed memory in the process.
#pragma once

#include <malloc.h>

#include <limits>

namespace horner {

// By default malloc returns every freed large block to the system, and the next one comes back
// zeroed, one page fault at a time. Training allocates the same blocks in every step. Call once,
// before the work.
inline void keep_pages() {
  mallopt(M_MMAP_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 64 << 20);
}

}  // namespace horner

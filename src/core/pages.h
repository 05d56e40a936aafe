// Memory that a process has touched stays its own.
#pragma once

#include <malloc.h>

#include <limits>

namespace horner {

// By default the C library gives every large block back to the system and gets it again, zeroed a
// page at a time; training takes the same blocks in each step. Call once, before the work.
inline void keep_pages() {
  mallopt(M_MMAP_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 64 << 20);
}

}  // namespace horner

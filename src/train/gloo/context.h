// See algorithm.h.
#pragma once

#include <chrono>

namespace gloo {
struct Context {
  void setTimeout(std::chrono::milliseconds);
};
}  // namespace gloo

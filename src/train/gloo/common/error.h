// See algorithm.h.
#pragma once

#include <chrono>

namespace gloo {
constexpr std::chrono::milliseconds kNoTimeout{-1};
}

// When passes and messages of a process began and ended: with HORNER_TRACE=FILE in the environment,
// rank r writes FILE.r as JSON for Perfetto or chrome://tracing at its end.
#pragma once

#include <chrono>

namespace horner::train {

using TraceClock = std::chrono::steady_clock;

enum class Lane { compute = 0, message = 1 };

bool tracing();
void trace(const char* name, Lane, TraceClock::time_point begin, TraceClock::time_point end);
void write_trace(int rank);  // nothing unless tracing()

// The time of a scope.
class Traced {
 public:
  explicit Traced(const char* name) : name_(name), begin_(TraceClock::now()) {}
  ~Traced() { trace(name_, Lane::compute, begin_, TraceClock::now()); }
  Traced(const Traced&) = delete;

 private:
  const char* name_;
  TraceClock::time_point begin_;
};

}  // namespace horner::train

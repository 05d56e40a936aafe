#include "train/trace.h"

#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "files/json.h"

namespace horner::train {

namespace {

struct Event {
  const char* name;
  Lane lane;
  TraceClock::time_point begin, end;
};

std::mutex guard;  // messages end in threads of their backend
std::vector<Event> events;

}  // namespace

static const char* trace_file() {
  static const char* const file = std::getenv("HORNER_TRACE");
  return file && *file ? file : nullptr;
}

bool tracing() {
  return trace_file();
}

void trace(const char* name, Lane lane, TraceClock::time_point begin, TraceClock::time_point end) {
  if (!tracing()) return;
  const std::lock_guard lock(guard);
  events.push_back({name, lane, begin, end});
}

void write_trace(int rank) {
  if (!tracing()) return;
  using Microseconds = std::chrono::duration<double, std::micro>;
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  const std::lock_guard lock(guard);
  for (const Event& e : events)
    all.push_back({{"name", e.name},
                   {"ph", "X"},
                   {"pid", rank},
                   {"tid", int(e.lane)},
                   {"ts", Microseconds(e.begin.time_since_epoch()).count()},
                   {"dur", Microseconds(e.end - e.begin).count()}});
  files::write_json(trace_file() + ("." + std::to_string(rank)), {{"traceEvents", all}});
}

}  // namespace horner::train

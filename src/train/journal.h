// metrics.jsonl: one JSON object with a "step" per line; and z-scores.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

namespace horner::train {

using Json = nlohmann::ordered_json;

// Removes lines of steps after `last` and an incomplete last line: a resumed run writes them again.
void rewind_journal(const std::filesystem::path&, int64_t last);

// Whether it has a line of a step.
bool has_lines(const std::filesystem::path&);

// Appends a line in one write.
void write_journal(const std::filesystem::path&, const Json& line);

// The most recent values of a per-step number.
struct Window {
  static constexpr size_t kSize = 128, kLeast = 16;
  std::vector<double> values;  // oldest first, at most kSize
};
void add(Window&, double);
// The z-score of `x`; none while the window is short.
std::optional<double> z_score(const Window&, double x);
// The value with that z-score; infinity while the window is short.
double at_z_score(const Window&, double z);

}  // namespace horner::train

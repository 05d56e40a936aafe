// metrics.jsonl: a JSON object a line, with a "step" each; and the z-scores in it.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

namespace horner::train {

using Json = nlohmann::ordered_json;

// Takes away what was written after step `last`, or not to its end: what a resumed run writes anew.
void rewind_journal(const std::filesystem::path&, int64_t last);

// Adds a line, whole, to the end of the file.
void write_journal(const std::filesystem::path&, const Json& line);

// The last values of a number that a step gives.
struct Window {
  static constexpr size_t kSize = 128, kLeast = 16;
  std::vector<double> values;  // oldest first, at most kSize
};
void add(Window&, double);
// How many standard deviations `x` is from the mean of the window; none while that is short.
std::optional<double> z_score(const Window&, double x);
// The value with that z-score; infinity while the window is short.
double at_z_score(const Window&, double z);

}  // namespace horner::train

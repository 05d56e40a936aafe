#include "core/names.h"

#include <algorithm>
#include <numeric>

namespace horner {

// Levenshtein distance.
static int distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0]++;
    for (size_t j = 1; j <= b.size(); ++j) {
      const int change = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

std::vector<std::string> nearest(std::string_view wanted, const std::vector<std::string>& names,
                                 size_t most) {
  std::vector<std::pair<int, std::string>> ranked;
  for (const std::string& name : names) ranked.emplace_back(distance(wanted, name), name);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> out;
  for (const auto& [d, name] : ranked)
    if (out.size() < most && d <= ranked[0].first + 1) out.push_back(name);
  return out;
}

std::string quoted(const std::vector<std::string>& names) {
  std::string out;
  for (size_t i = 0; i < names.size(); ++i)
    out += (i == 0 ? "'" : i + 1 == names.size() ? " or '" : ", '") + names[i] + "'";
  return out;
}

bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == '*')
    return matches(pattern.substr(1), name) || (!name.empty() && matches(pattern, name.substr(1)));
  return !name.empty() && pattern[0] == name[0] && matches(pattern.substr(1), name.substr(1));
}

}  // namespace horner

#include "core/quantities.h"

#include <cstdint>
#include <iterator>

namespace horner {

std::string count_text(double n) {
  if (n >= 1e12) return formatted("%.1e", n);
  std::string s = formatted("%.0f", n);
  for (int i = int(s.size()) - 3; i > 0; i -= 3) s.insert(s.begin() + i, ',');
  return s;
}

std::string size_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
  size_t unit = 0;
  for (; bytes >= 999.5 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1000;
  const bool whole = unit == 0 || bytes >= 99.95;
  return formatted(bytes >= 999.5 ? "%.1e" : whole ? "%.0f" : "%.1f", bytes) + " " + kUnits[unit];
}

std::string duration_text(double seconds) {
  const auto n = int64_t(seconds + 0.5);
  if (n >= 3600) return std::to_string(n / 3600) + " h " + std::to_string(n / 60 % 60) + " min";
  return n >= 60 ? std::to_string(n / 60) + " min " + std::to_string(n % 60) + " s"
                 : std::to_string(n) + " s";
}

}  // namespace horner

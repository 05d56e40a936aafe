#include "cli/table.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sstream>

namespace horner::cli {

// The bytes of the character at `i`, or of the colour code there.
static size_t step(std::string_view s, size_t i) {
  size_t end = i + 1;
  if (s[i] == '\033') {
    while (end < s.size() && s[end - 1] != 'm') ++end;
    return end - i;
  }
  while (end < s.size() && (s[end] & 0xC0) == 0x80) ++end;
  return end - i;
}

size_t width(std::string_view s) {
  size_t columns = 0;
  for (size_t i = 0; i < s.size(); i += step(s, i)) columns += s[i] != '\033';
  return columns;
}

static std::string cut(const std::string& s, size_t most) {
  if (width(s) <= most) return s;
  size_t end = 0;
  for (size_t column = 1; column < most; ++column) end += step(s, end);
  return s.substr(0, end) + "…";
}

static std::vector<size_t> widths(const Table& t, size_t most) {
  std::vector<size_t> out;
  auto widen = [&](const Row& row) {
    out.resize(std::max(out.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) out[c] = std::max(out[c], width(row[c]));
  };
  widen(t.head);
  for (const Row& row : t.rows) widen(row);
  size_t total = t.indent + 2 * (out.size() - 1);
  for (size_t w : out) total += w;
  if (most == 0 || total <= most) return out;
  constexpr size_t kLeast = 16;
  size_t& widest = *std::max_element(out.begin(), out.end());
  widest -= std::min(total - most, widest - std::min(widest, kLeast));
  return out;
}

std::string text(const Table& t, size_t most) {
  const std::vector<size_t> columns = widths(t, most);
  std::string out;
  auto line = [&](const Row& row) {
    std::string made(t.indent, ' ');
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string cell = cut(row[c], columns[c]);
      const std::string space(columns[c] - width(cell), ' ');
      const bool right = std::find(t.right.begin(), t.right.end(), c) != t.right.end();
      made += (c ? "  " : "") + (right ? space + cell : cell + space);
    }
    out += made.substr(0, made.find_last_not_of(' ') + 1) + "\n";
  };
  Row head = t.head;
  for (std::string& cell : head) cell = bold(cell);
  if (!head.empty()) line(head);
  for (const Row& row : t.rows) line(row);
  return out;
}

std::string wrapped(const std::string& text, size_t most, size_t indent) {
  std::istringstream words(text);
  std::string out, line;
  for (std::string word; words >> word;) {
    if (!line.empty() && width(line) + 1 + width(word) > most) out += line + "\n", line.clear();
    line += line.empty() ? std::string(indent, ' ') + word : " " + word;
  }
  return out + line + "\n";
}

size_t terminal_width() {
  winsize size{};
  if (!isatty(STDOUT_FILENO) || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return 0;
  return size.ws_col;
}

static std::string coloured(const char* code, const std::string& s) {
  static const bool wanted = isatty(STDOUT_FILENO) && !std::getenv("NO_COLOR");
  return wanted ? "\033[" + std::string(code) + "m" + s + "\033[0m" : s;
}
std::string bold(const std::string& s) {
  return coloured("1", s);
}
std::string faint(const std::string& s) {
  return coloured("2", s);
}
std::string red(const std::string& s) {
  return coloured("31", s);
}
std::string green(const std::string& s) {
  return coloured("32", s);
}

std::string formatted(const char* format, double x) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, x);
  return buffer;
}

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

}  // namespace horner::cli

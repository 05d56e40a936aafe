#include "cli/table.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
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

// The byte at which the first `columns` columns of `s` end.
static size_t end_of(std::string_view s, size_t columns) {
  size_t end = 0;
  for (size_t seen = 0; end < s.size(); end += step(s, end))
    if (s[end] != '\033' && ++seen > columns) break;
  return end;
}

std::string fitted(const std::string& s, size_t most) {
  if (most == 0 || width(s) <= most) return s;
  const bool coloured = s.find('\033') != s.npos;
  return s.substr(0, end_of(s, most - 1)) + "…" + (coloured ? "\033[0m" : "");
}

// The lines of a cell of `columns` columns, broken at spaces where there are some.
static std::vector<std::string> lines_of(const std::string& cell, size_t columns) {
  std::vector<std::string> out;
  std::string rest = cell;
  while (width(rest) > columns) {
    size_t end = end_of(rest, columns);
    if (const size_t space = rest.rfind(' ', end); space != rest.npos && space > 0) end = space;
    out.push_back(rest.substr(0, end));
    rest.erase(0, std::min(rest.size(), rest.find_first_not_of(' ', end)));
  }
  out.push_back(rest);
  return out;
}

static bool is_right(const Table& t, size_t column) {
  return std::find(t.right.begin(), t.right.end(), column) != t.right.end();
}

static size_t total(const Table& t, const std::vector<size_t>& columns) {
  size_t sum = t.indent + 2 * (std::max<size_t>(columns.size(), 1) - 1);
  for (const size_t w : columns) sum += w;
  return sum;
}

// The widths of the columns; text columns become narrower, the widest first, until all fit.
static std::vector<size_t> widths(const Table& t, size_t most) {
  constexpr size_t kLeast = 12;
  std::vector<size_t> out;
  auto widen = [&](const Row& row) {
    out.resize(std::max(out.size(), row.size()));
    for (size_t c = 0; c < row.size(); ++c) out[c] = std::max(out[c], width(row[c]));
  };
  widen(t.head);
  for (const Row& row : t.rows) widen(row);
  while (most > 0 && total(t, out) > most) {
    size_t widest = out.size();
    for (size_t c = 0; c < out.size(); ++c)
      if (!is_right(t, c) && out[c] > kLeast && (widest == out.size() || out[c] > out[widest]))
        widest = c;
    if (widest == out.size()) break;
    --out[widest];
  }
  return out;
}

// The table with its keys and the columns [from, to).
static Table part(const Table& t, size_t from, size_t to) {
  const auto chosen = [&](const Row& row) {
    Row out(row.begin(), row.begin() + long(std::min(t.keys, row.size())));
    for (size_t c = from; c < std::min(to, row.size()); ++c) out.push_back(row[c]);
    return out;
  };
  Table out{.head = chosen(t.head), .indent = t.indent, .keys = t.keys, .wrap = t.wrap};
  for (const Row& row : t.rows) out.rows.push_back(chosen(row));
  for (const size_t c : t.right)
    if (c < t.keys || (c >= from && c < to))
      out.right.push_back(c < t.keys ? c : c - from + t.keys);
  return out;
}

std::string text(const Table& t, size_t most) {
  const std::vector<size_t> columns = widths(t, most);
  if (most > 0 && columns.size() > t.keys + 1 && total(t, columns) > most) {
    std::string out;
    size_t keys = t.indent;
    for (size_t c = 0; c < t.keys; ++c) keys += columns[c] + 2;
    for (size_t from = t.keys; from < columns.size();) {
      size_t to = from + 1, sum = keys + columns[from];
      while (to < columns.size() && sum + 2 + columns[to] <= most) sum += 2 + columns[to++];
      out += (out.empty() ? "" : "\n") + text(part(t, from, to), most);
      from = to;
    }
    return out;
  }
  std::string out;
  auto line = [&](const Row& row) {
    std::vector<std::vector<std::string>> cells;
    size_t height = 1;
    for (size_t c = 0; c < row.size(); ++c) {
      cells.push_back(t.wrap ? lines_of(row[c], columns[c])
                             : std::vector<std::string>{fitted(row[c], columns[c])});
      height = std::max(height, cells.back().size());
    }
    for (size_t i = 0; i < height; ++i) {
      std::string made(t.indent, ' ');
      for (size_t c = 0; c < row.size(); ++c) {
        const std::string cell = i < cells[c].size() ? cells[c][i] : "";
        const std::string space(columns[c] - std::min(columns[c], width(cell)), ' ');
        made += (c ? "  " : "") + (is_right(t, c) ? space + cell : cell + space);
      }
      out += made.substr(0, made.find_last_not_of(' ') + 1) + "\n";
    }
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

std::string paragraph(const std::string& text, size_t indent) {
  const size_t columns = terminal_width();
  if (columns == 0) return std::string(indent, ' ') + text + "\n";
  return wrapped(text, std::min<size_t>(columns, 100), indent);
}

size_t terminal_width(int file) {
  winsize size{};
  if (!isatty(file) || ioctl(file, TIOCGWINSZ, &size) != 0) return 0;
  return size.ws_col;
}

bool can_redraw(int file) {
  const char* const terminal = std::getenv("TERM");
  return isatty(file) && (!terminal || std::string_view(terminal) != "dumb");
}

static std::string coloured(const char* code, const std::string& s) {
  static const bool wanted = can_redraw(STDOUT_FILENO) && !std::getenv("NO_COLOR");
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

}  // namespace horner::cli

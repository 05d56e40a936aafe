// Text for a terminal: aligned columns, and colour.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace horner::cli {

using Row = std::vector<std::string>;

struct Table {
  Row head;  // may be empty
  std::vector<Row> rows;
  std::vector<size_t> right = {};  // the columns aligned at their right: numbers
  size_t indent = 0;
};

// One line a row. Where that is wider than `most` (0: no limit), the widest column is cut with "…";
// it must hold no colour.
std::string text(const Table&, size_t most = 0);

// The text on indented lines of at most `most` columns.
std::string wrapped(const std::string& text, size_t most, size_t indent);

// Columns that UTF-8 text takes on a terminal; colours take none.
size_t width(std::string_view);

std::string formatted(const char* format, double x);  // by printf's rules

std::string count_text(double n);           // "47,905", "3.1e+24"
std::string size_text(double bytes);        // "17 KB", "12.5 MB"
std::string duration_text(double seconds);  // "7 s", "2 min 5 s", "3 h 20 min"

size_t terminal_width();  // of stdout; 0 when it is not a terminal

// Coloured only when stdout is a terminal and NO_COLOR is unset.
std::string bold(const std::string&);
std::string faint(const std::string&);
std::string red(const std::string&);
std::string green(const std::string&);

}  // namespace horner::cli

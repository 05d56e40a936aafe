// Text for a terminal: aligned columns, and colour.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/quantities.h"

namespace horner::cli {

using Row = std::vector<std::string>;

struct Table {
  Row head;  // may be empty
  std::vector<Row> rows;
  std::vector<size_t> right = {};  // the columns aligned at their right: numbers
  size_t indent = 0;
  size_t keys = 1;    // columns that every part of a table repeats when it is too wide
  bool wrap = false;  // long text continues on the next line instead of being cut
};

size_t terminal_width(int file = 1);  // of stdout; 0 when it is not a terminal

// One line a row. Where that is wider than `most` (0: no limit), text columns are cut with "…" (or
// continue below, with `wrap`); if numbers alone are too wide, the columns come in several tables
// that repeat the first.
std::string text(const Table&, size_t most = terminal_width());

// The text on indented lines of at most `most` columns.
std::string wrapped(const std::string& text, size_t most, size_t indent);

// A paragraph: wrapped on a terminal, one line elsewhere.
std::string paragraph(const std::string& text, size_t indent = 0);

// Columns that UTF-8 text takes on a terminal; colours take none.
size_t width(std::string_view);

// The text, or what fits into `most` columns (0: no limit) with "…".
std::string fitted(const std::string& text, size_t most);

// Whether a file is a terminal that understands more than lines (not TERM=dumb).
bool can_redraw(int file);

// Coloured only when stdout is such a terminal and NO_COLOR is unset.
std::string bold(const std::string&);
std::string faint(const std::string&);
std::string red(const std::string&);
std::string green(const std::string&);

}  // namespace horner::cli

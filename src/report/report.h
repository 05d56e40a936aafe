// A report as plain data: a title, sentences, and sections with one chart, table or list each;
// written as JSON and as one self-contained HTML file.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "report/svg.h"

namespace horner::report {

// One value per category; NaN if missing.
struct Bar {
  std::string name;
  std::vector<double> values;
  std::vector<double> spread = {};  // plus or minus
  std::string group = "";
  bool strong = false;
};
struct Bars {
  std::string label;  // of the value axis
  std::vector<std::string> categories;
  std::vector<Bar> series;
  bool dots = false;  // points, on an axis that need not start at 0
};

struct Column {
  std::string name;
  bool number = false;
  std::string about = "";
};
struct Cell {
  std::string text;
  double value = 0;  // sort key in a column of numbers
};
struct Table {
  std::vector<Column> columns;
  std::vector<std::vector<Cell>> rows;
};

struct Section;
struct HeatMap {
  std::string label, x_label, y_label;
  std::vector<std::string> x, y;
  std::vector<std::vector<double>> values;  // [y][x]
  std::map<std::pair<size_t, size_t>, std::vector<Section>> details =
      {};  // of (y, x), shown on click
};

struct Boxes {
  std::string x_label, y_label;
  std::vector<std::string> categories;
  struct Series {
    std::string name;
    std::vector<std::vector<double>> boxes;  // minimum, quartiles, maximum
  };
  std::vector<Series> series;
  std::vector<report::Series> lines = {};  // over the boxes; x is the index of the category
};

struct Fact {
  std::string name, value;
  bool code = false;
};
using Facts = std::vector<Fact>;

struct Section {
  std::string heading, text;
  std::variant<Chart, Bars, Table, HeatMap, Boxes, Facts> content;
  bool half = false;  // half width if there is room
};

struct Report {
  std::string title, subtitle;
  std::vector<std::string> summary;
  std::vector<Section> sections;
  std::string footer = "";
};

nlohmann::ordered_json to_json(const Report&);

// The page with the report embedded. Throws if the page was not built (see has_page).
std::string to_html(const Report&);

// Whether the page is part of this program: npm builds it from web/.
bool has_page();

}  // namespace horner::report

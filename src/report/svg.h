// A line chart as SVG: round ticks, a thin grid, every line labelled at its end.
#pragma once

#include <string>
#include <vector>

namespace horner::report {

struct Point {
  double x, y;
};

struct Series {
  std::string name;
  std::vector<Point> points;
  int colour = -1;  // palette index; -1: the index of the series
  bool dashed = false;
  // For the report page: lines with the same name share a legend entry.
  std::string group = "";           // entries of a group share a hue
  bool strong = false;              // the reference of a comparison
  std::vector<double> spread = {};  // plus or minus, per point
};

struct Chart {
  std::string title, x_label, y_label;
  bool log_x = false, log_y = false;
  std::vector<Series> series;
  bool smooth = false;  // noisy: the page offers smoothing
};

inline constexpr double kWidth = 720, kHeight = 420;

// 720 x 420 on white. A line breaks at points that are not finite, or not positive on a log axis.
std::string chart(const Chart&);

}  // namespace horner::report

// A line chart as an SVG picture: round ticks, a thin grid, every line named at its end.
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
  int colour = -1;  // of a palette; -1: its place among the series
  bool dashed = false;
  // For the page of a report: lines of one name are one entry of its legend.
  std::string group = "";           // entries of a group share a hue
  bool strong = false;              // what the others are compared with
  std::vector<double> spread = {};  // plus or minus, at each point
};

struct Chart {
  std::string title, x_label, y_label;
  bool log_x = false, log_y = false;
  std::vector<Series> series;
  bool smooth = false;  // noisy: the page offers to smooth it
};

inline constexpr double kWidth = 720, kHeight = 420;

// 720 x 420 on white. A line breaks where a point cannot be drawn: not finite, or not positive on a
// logarithmic axis.
std::string chart(const Chart&);

}  // namespace horner::report

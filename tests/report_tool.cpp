// A report with a section of every kind, for tests/report_test.py: report_tool OUT.html [NAME]
// NAME is used for a run, a category, a cell and a heading: text that users control.
#include <cmath>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "report/report.h"

using namespace horner::report;

static Chart curves(const std::string& name) {
  Chart c{.x_label = "step", .y_label = "loss", .log_y = true, .smooth = true};
  const auto line = [&](const std::string& run, const std::string& group, double last, int seed) {
    Series s{.name = run, .group = group, .strong = run == "softmax"};
    for (int i = 1; i <= 300; ++i)
      s.points.push_back({i * 2.0, last + 4 / std::sqrt(i) + 0.02 * std::sin(i * (7.1 + seed))});
    c.series.push_back(s);
  };
  for (int seed = 0; seed < 2; ++seed) {
    line("softmax", "", 1.2, seed);
    for (int n = 1; n <= 6; ++n) line("taylor" + std::to_string(n), "taylor", 1.2 + 1.0 / n, seed);
    for (const char* k : {"linear_elu", "linear_relu"}) line(k, "linear kernels", 2.5, seed);
    line(name, "", 1.6, seed);
  }
  c.series.push_back({.name = "a gap", .points = {{1, 2}, {200, NAN}, {400, 1.5}, {600, -1}}});
  return c;
}

static Chart sweep() {
  Chart c{.x_label = "order", .y_label = "accuracy"};
  c.series.push_back(
      {.name = "softmax", .points = {{1, 0.99}, {10, 0.99}}, .dashed = true, .strong = true});
  for (const char* name : {"plain", "centred"}) {
    Series s{.name = name};
    for (int n = 1; n <= 10; ++n) {
      s.points.push_back({double(n), 1 - 0.5 / n / n - (name[0] == 'p' ? 0.1 / n : 0)});
      s.spread.push_back(0.03 / n);
    }
    c.series.push_back(s);
  }
  return c;
}

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string name = argc > 2 ? argv[2] : "a run";
  Report r{.title = "Sample " + name,
           .subtitle = "every kind of section",
           .summary = {"First " + name, "Second."}};
  r.sections.push_back({"Loss " + name, "Text of " + name, curves(name)});
  r.sections.push_back({"Orders", "", sweep(), true});
  r.sections.push_back(
      {"Final", "",
       Bars{.label = "loss",
            .categories = {"softmax", "l2", name},
            .series = {{.name = "loss", .values = {1.2, 1.21, NAN}, .spread = {0.01, 0.03, 0}}},
            .dots = true},
       true});
  r.sections.push_back({"Speed", "",
                        Bars{.label = "tokens/s",
                             .categories = {"softmax", "l2", name},
                             .series = {{.name = "cpu", .values = {1000, 800, 650}},
                                        {.name = "gpu", .values = {90000, 70000, 61000}}}},
                        true});
  r.sections.push_back({"Table", "",
                        Table{.columns = {{"name"}, {"loss", true, "the last one"}, {"note"}},
                              .rows = {{{"taylor10"}, {"1.300", 1.3}, {name}},
                                       {{"taylor2"}, {"1.900", 1.9}, {""}},
                                       {{name}, {"–", NAN}, {"x"}},
                                       {{"softmax"}, {"1.200", 1.2}, {""}}}},
                        true});
  HeatMap h{.label = "entropy", .x_label = "head", .y_label = "layer"};
  for (int y = 0; y < 6; ++y) {
    h.y.push_back("layer " + std::to_string(y));
    h.values.emplace_back();
    for (int x = 0; x < 8; ++x)
      h.values.back().push_back(y == 2 && x == 3 ? NAN : std::sin(y * 0.7) + std::cos(x * 0.5));
  }
  for (int x = 0; x < 8; ++x) h.x.push_back(std::to_string(x));
  h.details[{1, 2}] = {{"Head 1.2 " + name, "", Facts{{"entropy", "1.5"}}}};
  r.sections.push_back({"Heat", "Click a cell.", h});
  r.sections.push_back({"Boxes", "",
                        Boxes{.x_label = "N",
                              .y_label = "share",
                              .categories = {"1", "5", "20"},
                              .series = {{"measured",
                                          {{0.5, 0.7, 0.8, 0.9, 1},
                                           {0.4, 0.6, 0.7, 0.8, 0.95},
                                           {0.3, 0.6, 0.72, 0.78, 0.9}}}},
                              .lines = {{.name = "upper bound",
                                         .points = {{0, 1}, {1, 0.97}, {2, 0.92}},
                                         .dashed = true}}}});
  r.sections.push_back(
      {"Settings", "",
       Facts{{"steps", "600"}, {"command", "horner study quick --out " + name, true}}});
  if (!has_page()) return 3;
  std::ofstream(argv[1]) << to_html(r);
}

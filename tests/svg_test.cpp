// Line charts: well-formed, every point in the frame, lines break at points that cannot be drawn.
#include "report/svg.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <sstream>

namespace horner::report {
namespace {

// Checks nesting of tags and entities; returns "" or the error.
std::string why_not_xml(const std::string& text) {
  static const std::regex bare("&(?!(amp|lt|gt|quot);)");
  static const std::regex tag("<(/?)([a-z]+)((?: [a-zA-Z0-9-]+=\"[^\"<]*\")*)(/?)>");
  if (std::regex_search(text, bare)) return "a bare &";
  std::vector<std::string> open;
  size_t at = 0;
  for (auto m = std::sregex_iterator(text.begin(), text.end(), tag); m != std::sregex_iterator();
       ++m) {
    const std::string between = text.substr(at, size_t(m->position()) - at);
    if (between.find_first_of("<>") != between.npos) return "no tag: " + between;
    at = size_t(m->position() + m->length());
    const std::string name = (*m)[2];
    if ((*m)[1].length() > 0) {
      if (open.empty() || open.back() != name) return "closes " + name;
      open.pop_back();
    } else if ((*m)[4].length() == 0) {
      open.push_back(name);
    }
  }
  return !open.empty() ? "open: " + open.back() : text.substr(at) == "\n" ? "" : "a tail";
}

std::vector<std::string> all(const std::string& text, const std::string& pattern) {
  const std::regex r(pattern);
  std::vector<std::string> out;
  for (auto m = std::sregex_iterator(text.begin(), text.end(), r); m != std::sregex_iterator(); ++m)
    out.push_back((*m)[1]);
  return out;
}

std::vector<std::vector<Point>> polylines(const std::string& svg) {
  std::vector<std::vector<Point>> out;
  for (std::string points : all(svg, "<polyline points=\"([^\"]*)\"")) {
    std::replace(points.begin(), points.end(), ',', ' ');
    std::istringstream numbers(points);
    out.emplace_back();
    for (Point p; numbers >> p.x >> p.y;) out.back().push_back(p);
  }
  return out;
}

struct Box {
  double x, y, width, height;
};
Box frame(const std::string& svg) {
  const auto side = [&](const std::string& name) {
    return std::stod(all(svg, "class=\"frame\"[^>]* " + name + "=\"([^\"]*)\"").at(0));
  };
  return {side("x"), side("y"), side("width"), side("height")};
}

Chart curves(bool log_x, bool log_y) {
  Chart c{"a < b & \"c\"", "x > 0", "y", log_x, log_y, {}};
  for (int i = 1; i <= 9; ++i) {
    Series& s = c.series.emplace_back(Series{"line <" + std::to_string(i) + ">", {}});
    for (double x = 1; x < 2e6; x *= 3) s.points.push_back({x, std::pow(x, -0.2 * i) * 700});
  }
  return c;
}

TEST(Svg, is_xml_with_every_point_in_the_frame) {
  for (const bool log_x : {false, true})
    for (const bool log_y : {false, true}) {
      const std::string svg = chart(curves(log_x, log_y));
      EXPECT_EQ(why_not_xml(svg), "");
      const auto lines = polylines(svg);
      ASSERT_EQ(lines.size(), 9u);
      const Box f = frame(svg);
      EXPECT_GE(f.x, 0);
      EXPECT_LE(f.x + f.width, kWidth);
      EXPECT_LE(f.y + f.height, kHeight);
      for (const auto& line : lines) {
        ASSERT_EQ(line.size(), 14u);
        for (size_t i = 0; i < line.size(); ++i) {
          EXPECT_GE(line[i].x, f.x - 0.01);
          EXPECT_LE(line[i].x, f.x + f.width + 0.01);
          EXPECT_GE(line[i].y, f.y - 0.01);
          EXPECT_LE(line[i].y, f.y + f.height + 0.01);
          if (i == 0) continue;
          EXPECT_GE(line[i].x, line[i - 1].x);
          EXPECT_GE(line[i].y, line[i - 1].y);  // y grows downwards
        }
      }
    }
}

TEST(Svg, a_logarithm_makes_a_power_straight) {
  const auto line = polylines(chart(curves(true, true))).at(3);
  for (size_t i = 1; i + 1 < line.size(); ++i) {
    EXPECT_NEAR(line[i].x, (line[i - 1].x + line[i + 1].x) / 2, 0.02);
    EXPECT_NEAR(line[i].y, (line[i - 1].y + line[i + 1].y) / 2, 0.02);
  }
}

TEST(Svg, names_stand_apart_in_the_picture) {
  Chart c = curves(true, true);
  for (Series& s : c.series) s.points.back().y = 1;  // all end at the same point
  const std::string svg = chart(c);
  std::vector<double> heights;
  for (const std::string& y :
       all(svg, "<text x=\"[^\"]*\" y=\"([^\"]*)\" text-anchor=\"start\" fill=\"#"))
    heights.push_back(std::stod(y));
  ASSERT_EQ(heights.size(), 9u);
  std::sort(heights.begin(), heights.end());
  for (size_t i = 1; i < heights.size(); ++i) EXPECT_GE(heights[i] - heights[i - 1], 14.9);
  EXPECT_GT(heights.front(), 0);
  EXPECT_LT(heights.back(), kHeight);
}

TEST(Svg, a_line_breaks_where_nothing_can_be_drawn) {
  Chart c{"", "", "", false, true, {}};
  c.series.push_back({"gaps", {{1, 10}, {2, 20}, {3, 0}, {4, 40}, {5, NAN}, {6, 5}, {7, 7}}});
  const auto lines = polylines(chart(c));
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].size(), 2u);
  EXPECT_EQ(lines[1].size(), 1u);
  EXPECT_EQ(lines[2].size(), 2u);
}

TEST(Svg, ticks_are_round) {
  const auto ticks = [](bool log, double low, double high) {
    Chart c{"", "", "", log, false, {{"", {{low, 0}, {high, 1}}}}};
    std::vector<std::string> out = all(chart(c), "text-anchor=\"middle\">([^<]+)<");
    return out;
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(ticks(false, 1, 10), (Words{"1", "2", "3", "4", "5", "6", "7", "8", "9", "10"}));
  EXPECT_EQ(ticks(false, -0.3, 0.31).front(), "-0.3");
  EXPECT_EQ(ticks(false, 5, 5),
            (Words{"4", "4.2", "4.4", "4.6", "4.8", "5", "5.2", "5.4", "5.6", "5.8", "6"}));
  EXPECT_EQ(ticks(true, 1000, 1e6), (Words{"1,000", "10,000", "100,000", "1,000,000"}));
  EXPECT_EQ(ticks(true, 3, 40), (Words{"2", "5", "10", "20", "50"}));
  EXPECT_EQ(ticks(true, 1e-5, 1e-3), (Words{"10⁻⁵", "10⁻⁴", "10⁻³"}));
}

TEST(Svg, nothing_to_draw_is_a_picture_too) {
  EXPECT_EQ(why_not_xml(chart({})), "");
  const Chart c{"", "", "", true, true, {{"none", {{0, 1}, {1, -1}}}, {"one", {{5, 5}}}}};
  const std::string svg = chart(c);
  EXPECT_EQ(why_not_xml(svg), "");
  EXPECT_EQ(polylines(svg).size(), 1u);
  EXPECT_EQ(svg.find("nan"), svg.npos);
}

}  // namespace
}  // namespace horner::report

#include "report/svg.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace horner::report {

namespace {

constexpr const char* kColours[] = {"#0b62a4", "#c8501e", "#2b7f3f", "#8a3fa0",
                                    "#a07a00", "#00807d", "#b8316f", "#555555"};
constexpr double kTop = 46, kBottom = 366, kLeft = 78, kLine = 15, kLetter = 6.9;

std::string number(double x, const char* format = "%.2f") {
  char text[64];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) switch (c) {
        // clang-format off
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      // clang-format on
      default:
        // XML does not allow the other control characters.
        out += static_cast<unsigned char>(c) < 32 ? ' ' : c;
    }
  return out;
}

size_t letters(const std::string& utf8) {
  return size_t(std::count_if(utf8.begin(), utf8.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

// 10^n, and 2 or 5 times that.
std::string power_text(double x) {
  static constexpr const char* kDigits[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  const int n = int(std::floor(std::log10(x) + 1e-9));
  const double lead = std::round(x / std::pow(10, n));
  std::string out = (lead == 1 ? "10" : number(lead, "%.0f") + "·10") + (n < 0 ? "⁻" : "");
  for (const char digit : std::to_string(std::abs(n))) out += kDigits[digit - '0'];
  return out;
}

std::string plain_text(double x) {
  std::string out = number(x, "%.10g");
  const size_t end = std::min(out.find('.'), out.size()), first = out[0] == '-';
  if (out.find('e') == out.npos)
    for (size_t at = end; at > first + 3; at -= 3) out.insert(at - 3, ",");
  return out;
}

// One axis: maps data to pixels, and holds the ticks.
struct Axis {
  bool log = false;
  double from = 0, to = 1;         // data range
  double pixel = 0, to_pixel = 1;  // pixels of its ends
  std::vector<double> ticks = {};

  bool takes(double x) const { return std::isfinite(x) && (!log || x > 0); }
  double at(double x) const {
    const double share = log ? std::log(x / from) / std::log(to / from) : (x - from) / (to - from);
    return pixel + share * (to_pixel - pixel);
  }
  std::string label(double tick) const {
    const bool powers = log && (ticks.front() < 1e-3 || ticks.back() > 1e6);
    return powers ? power_text(tick) : plain_text(tick);
  }
};

// Round numbers around [low, high], at most about `most` of them.
void set_linear(Axis& a, double low, double high, double most) {
  if (low == high) low -= 1, high += 1;
  const double least = (high - low) / most, unit = std::pow(10, std::floor(std::log10(least)));
  double step = 10 * unit;
  for (const double m : {5., 2., 1.})
    if (m * unit >= least * (1 - 1e-9)) step = m * unit;
  const double first = std::floor(low / step + 1e-9), last = std::ceil(high / step - 1e-9);
  for (double i = first; i <= last; ++i) a.ticks.push_back(i * step);
  a.from = a.ticks.front(), a.to = a.ticks.back();
}

// The range ends at 1, 2 or 5 times a power of ten; ticks at the powers, or at all of those where
// there would be fewer than three.
void set_log(Axis& a, double low, double high, double most) {
  std::vector<double> marks;
  const int first = int(std::floor(std::log10(low))) - 1, last = int(std::ceil(std::log10(high)));
  for (int n = first; n <= last + 1; ++n)
    for (const double m : {1., 2., 5.}) marks.push_back(m * std::pow(10, n));
  const auto above = [&](double x) { return std::upper_bound(marks.begin(), marks.end(), x); };
  auto begin = above(low * (1 + 1e-9)) - 1, end = above(high * (1 - 1e-9));
  if (end - begin < 2) --begin, ++end;
  a.from = *begin, a.to = *end;
  const auto is_power = [](double x) {
    return std::abs(std::log10(x) - std::round(std::log10(x))) < 1e-9;
  };
  const auto powers = size_t(std::count_if(begin, end + 1, is_power));
  const auto every = std::max(1, int(std::ceil(double(powers) / most)));
  for (auto m = begin; m <= end; ++m) {
    const bool wanted = is_power(*m) && int(std::lround(std::log10(*m))) % every == 0;
    if (powers < 3 || wanted) a.ticks.push_back(*m);
  }
}

Axis axis(const Chart& c, bool is_x, double pixel, double to_pixel) {
  Axis a{is_x ? c.log_x : c.log_y};
  a.pixel = pixel, a.to_pixel = to_pixel;
  const Axis other{is_x ? c.log_y : c.log_x};
  double low = INFINITY, high = -INFINITY;
  for (const Series& s : c.series)
    for (const Point& p : s.points) {
      const double x = is_x ? p.x : p.y;
      if (!a.takes(x) || !other.takes(is_x ? p.y : p.x)) continue;
      low = std::min(low, x), high = std::max(high, x);
    }
  if (low > high) low = a.log ? 1 : 0, high = a.log ? 10 : 1;  // nothing to draw
  const double most = std::abs(to_pixel - pixel) / (is_x ? 50 : 32);
  a.log ? set_log(a, low, high, most) : set_linear(a, low, high, most);
  return a;
}

struct Word {
  double x, y;
  const char* anchor;
  std::string extra = "";
};
std::string word(const Word& w, const std::string& text) {
  return "<text x=\"" + number(w.x) + "\" y=\"" + number(w.y) + "\" text-anchor=\"" + w.anchor +
         "\"" + w.extra + ">" + escaped(text) + "</text>\n";
}

std::string line(double x, double y, double to_x, double to_y, const std::string& extra) {
  return "<line x1=\"" + number(x) + "\" y1=\"" + number(y) + "\" x2=\"" + number(to_x) +
         "\" y2=\"" + number(to_y) + "\"" + extra + "/>\n";
}

std::string frame(const Chart& c, const Axis& x, const Axis& y) {
  const std::string grid = " stroke=\"#e2e2e2\"", middle = number((kTop + kBottom) / 2);
  std::string out;
  for (const double t : x.ticks) {
    out += line(x.at(t), kTop, x.at(t), kBottom, grid);
    out += word({x.at(t), kBottom + 17, "middle"}, x.label(t));
  }
  for (const double t : y.ticks) {
    out += line(x.pixel, y.at(t), x.to_pixel, y.at(t), grid);
    out += word({x.pixel - 8, y.at(t) + 4, "end"}, y.label(t));
  }
  out += "<rect class=\"frame\" x=\"" + number(x.pixel) + "\" y=\"" + number(kTop) + "\" width=\"" +
         number(x.to_pixel - x.pixel) + "\" height=\"" + number(kBottom - kTop) +
         "\" fill=\"none\" stroke=\"#999999\"/>\n";
  out += word({kLeft, 28, "start", " font-size=\"15\" font-weight=\"bold\""}, c.title);
  out += word({(x.pixel + x.to_pixel) / 2, kHeight - 14, "middle"}, c.x_label);
  const std::string turned = " transform=\"rotate(-90 18 " + middle + ")\"";
  return out + word({18, (kTop + kBottom) / 2, "middle", turned}, c.y_label);
}

struct Drawn {
  std::string text;     // elements
  Point end{NAN, NAN};  // pixels of the last point
};

Drawn curve(const Series& s, const Axis& x, const Axis& y, const std::string& colour) {
  Drawn out;
  std::string points, dots;
  const auto finish = [&] {
    if (points.empty()) return;
    out.text += "<polyline points=\"" + points + "\" fill=\"none\" stroke=\"" + colour +
                "\" stroke-width=\"2\" stroke-linejoin=\"round\"" +
                (s.dashed ? " stroke-dasharray=\"6 4\"" : "") + "/>\n";
    points.clear();
  };
  for (const Point& p : s.points) {
    if (!x.takes(p.x) || !y.takes(p.y)) {
      finish();
      continue;
    }
    out.end = {x.at(p.x), y.at(p.y)};
    points += (points.empty() ? "" : " ") + number(out.end.x) + "," + number(out.end.y);
    dots += "<circle cx=\"" + number(out.end.x) + "\" cy=\"" + number(out.end.y) +
            "\" r=\"2.6\" fill=\"" + (s.dashed ? "#ffffff" : colour) + "\" stroke=\"" + colour +
            "\"/>\n";
  }
  finish();
  constexpr size_t kMostDots = 40;
  if (s.points.size() <= kMostDots) out.text += dots;
  return out;
}

// Label positions near `wanted`, a line apart, and between kTop and kBottom if they fit.
std::vector<double> apart(const std::vector<double>& wanted) {
  std::vector<size_t> order(wanted.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return wanted[a] < wanted[b]; });
  std::vector<double> out(wanted);
  double least = kTop;
  for (const size_t i : order) out[i] = least = std::max(out[i], least), least += kLine;
  double most = kBottom;
  for (auto i = order.rbegin(); i != order.rend(); ++i)
    out[*i] = most = std::min(out[*i], most), most -= kLine;
  return out;
}

}  // namespace

std::string chart(const Chart& c) {
  size_t longest = 0;
  for (const Series& s : c.series) longest = std::max(longest, letters(s.name));
  const double right = kWidth - std::min(34 + kLetter * double(longest), kWidth / 2);
  const Axis x = axis(c, true, kLeft, right), y = axis(c, false, kBottom, kTop);
  const std::string size = number(kWidth, "%.0f") + " " + number(kHeight, "%.0f");
  std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + size +
                    "\" width=\"" + number(kWidth, "%.0f") + "\" height=\"" +
                    number(kHeight, "%.0f") +
                    "\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#222222\">\n<title>" +
                    escaped(c.title) +
                    "</title>\n<rect width=\"100%\" height=\"100%\" "
                    "fill=\"#ffffff\"/>\n" +
                    frame(c, x, y);
  std::vector<double> heights;
  std::vector<size_t> named;
  std::vector<Point> ends;
  const auto colour = [&](size_t i) {
    const int own = c.series[i].colour;
    return std::string(kColours[(own < 0 ? i : size_t(own)) % std::size(kColours)]);
  };
  for (size_t i = 0; i < c.series.size(); ++i) {
    const Drawn d = curve(c.series[i], x, y, colour(i));
    out += d.text;
    if (std::isnan(d.end.x)) continue;
    named.push_back(i), ends.push_back(d.end), heights.push_back(d.end.y);
  }
  heights = apart(heights);
  for (size_t i = 0; i < named.size(); ++i) {
    const std::string thin = " stroke=\"" + colour(named[i]) + "\" stroke-width=\"0.8\"";
    out += line(ends[i].x + 4, ends[i].y, right + 18, heights[i], thin);
    out += word({right + 22, heights[i] + 4, "start", " fill=\"" + colour(named[i]) + "\""},
                c.series[named[i]].name);
  }
  return out + "</svg>\n";
}

}  // namespace horner::report

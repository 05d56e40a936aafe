#include "report/report.h"

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "report/page.h"

namespace horner::report {

using Json = nlohmann::ordered_json;  // dump() writes NaN and infinity as null

// The fields common to lines and bars, unless they have their defaults.
template <class S>
static Json named(const S& s) {
  Json out = {{"name", s.name}};
  if (!s.group.empty()) out["group"] = s.group;
  if (s.strong) out["strong"] = true;
  if (!s.spread.empty()) out["spread"] = s.spread;
  return out;
}

static Json lines(const std::vector<Series>& series) {
  Json out = Json::array();
  for (const Series& s : series) {
    Json j = named(s);
    if (s.dashed) j["dashed"] = true;
    j["points"] = Json::array();
    for (Point p : s.points) j["points"].push_back({p.x, p.y});
    out.push_back(j);
  }
  return out;
}

static Json json(const Section&);

// clang-format off
struct Content {
  Json operator()(const Chart& c) const {
    return {{"kind", "lines"}, {"x_label", c.x_label}, {"y_label", c.y_label}, {"log_x", c.log_x}, {"log_y", c.log_y},
            {"smooth", c.smooth}, {"series", lines(c.series)}};
  }
  Json operator()(const Bars& b) const {
    Json series = Json::array();
    for (const Bar& s : b.series) {
      series.push_back(named(s));
      series.back()["values"] = s.values;
    }
    return {{"kind", "bars"}, {"label", b.label}, {"dots", b.dots}, {"categories", b.categories}, {"series", series}};
  }
  Json operator()(const Table& t) const {
    Json columns = Json::array(), rows = Json::array();
    for (const Column& c : t.columns) columns.push_back({{"name", c.name}, {"number", c.number}, {"about", c.about}});
    for (const auto& row : t.rows) {
      Json cells = Json::array();
      for (size_t i = 0; i < row.size(); ++i)
        cells.push_back(t.columns.at(i).number ? Json{{"value", row[i].value}, {"text", row[i].text}} : Json(row[i].text));
      rows.push_back(cells);
    }
    return {{"kind", "table"}, {"columns", columns}, {"rows", rows}};
  }
  Json operator()(const HeatMap& h) const {
    Json values = Json::array(), details = Json::array();
    for (const auto& row : h.values) values.push_back(row);
    for (const auto& [at, sections] : h.details) {
      Json inner = Json::array();
      for (const Section& s : sections) inner.push_back(json(s));
      details.push_back({{"y", at.first}, {"x", at.second}, {"sections", inner}});
    }
    return {{"kind", "heat_map"}, {"label", h.label}, {"x_label", h.x_label}, {"y_label", h.y_label}, {"x", h.x}, {"y", h.y},
            {"values", values}, {"details", details}};
  }
  Json operator()(const Boxes& b) const {
    Json series = Json::array();
    for (const Boxes::Series& s : b.series) {
      Json boxes = Json::array();
      for (const auto& box : s.boxes) boxes.push_back(box);
      series.push_back({{"name", s.name}, {"boxes", boxes}});
    }
    return {{"kind", "boxes"}, {"x_label", b.x_label}, {"y_label", b.y_label}, {"categories", b.categories}, {"series", series},
            {"lines", lines(b.lines)}};
  }
  Json operator()(const Facts& facts) const {
    Json out = Json::array();
    for (const Fact& f : facts) out.push_back({{"name", f.name}, {"value", f.value}, {"code", f.code}});
    return {{"kind", "facts"}, {"facts", out}};
  }
};
// clang-format on

static Json json(const Section& s) {
  return {{"heading", s.heading},
          {"text", s.text},
          {"half", s.half},
          {"content", std::visit(Content{}, s.content)}};
}

Json to_json(const Report& r) {
  Json sections = Json::array();
  for (const Section& s : r.sections) sections.push_back(json(s));
  return {{"title", r.title},
          {"subtitle", r.subtitle},
          {"summary", r.summary},
          {"sections", sections},
          {"footer", r.footer}};
}

// JSON that cannot close a <script> or break a line: special characters, which occur only inside
// JSON strings, become \u escapes.
static std::string inside_html(const Json& j) {
  std::string out;
  for (const std::string text = j.dump(-1, ' ', true, Json::error_handler_t::replace);
       const char c : text) {
    if (c == '<' || c == '>' || c == '&') {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      out += escape;
    } else {
      out += c;
    }
  }
  return out;
}

bool has_page() {
  return !page().empty();
}

std::string to_html(const Report& r) {
  constexpr std::string_view kHere = "/*report*/";
  const std::string_view html = page();
  const size_t at = html.find(kHere);
  if (at == html.npos)
    throw std::runtime_error(
        "this program was built without the report page; install npm and rebuild");
  return std::string(html.substr(0, at)) + inside_html(to_json(r)) +
         std::string(html.substr(at + kHere.size()));
}

}  // namespace horner::report

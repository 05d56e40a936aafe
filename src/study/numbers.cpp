#include "study/numbers.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "diag/series.h"
#include "files/json.h"

namespace horner::study {

static constexpr const char* kKind = "horner-runs";

// Curves and terms are for the eye: five digits.
static Json five_digits(double x) {
  if (!std::isfinite(x)) return nullptr;
  char text[32];
  std::snprintf(text, sizeof text, "%.5g", x);
  return std::strtod(text, nullptr);
}

static Json five_digits(const std::vector<double>& values) {
  Json out = Json::array();
  for (const double x : values) out.push_back(five_digits(x));
  return out;
}

// At most `most` points, each the mean of as many neighbours.
static Json thinned(const Points& points, size_t most) {
  const size_t each = std::max<size_t>(1, (points.size() + most - 1) / most);
  Json out = Json::array();
  for (size_t i = 0; i < points.size(); i += each) {
    const size_t n = std::min(each, points.size() - i);
    double x = 0, y = 0;
    for (size_t k = 0; k < n; ++k) x += points[i + k].x, y += points[i + k].y;
    out.push_back({x / double(n), five_digits(y / double(n))});
  }
  return out;
}

static Json exact(const Points& points) {
  Json out = Json::array();
  for (const auto& p : points) out.push_back({p.x, std::isfinite(p.y) ? Json(p.y) : Json()});
  return out;
}

static double number_or_nan(const Json& j) {
  return j.is_number() ? j.get<double>() : std::nan("");
}

static Points points_of(const Json& j) {
  Points out;
  for (const Json& p : j) out.push_back({p.at(0).get<double>(), number_or_nan(p.at(1))});
  return out;
}

static std::vector<double> values_of(const Json& j, double missing = NAN) {
  std::vector<double> out;
  for (const Json& x : j) out.push_back(x.is_number() ? x.get<double>() : missing);
  return out;
}

// The settings that are not as the struct has them, without those of the machine.
static Json changed(const train::Settings& s) {
  const Json usual = to_json(train::Settings()), own = to_json(s);
  Json out = Json::object();
  for (const auto& [name, value] : own.items())
    if (value != usual[name] && name != "threads" && name != "backend") out[name] = value;
  return out;
}

// As many orders as the page shows, and up to the largest term.
static Json terms(const std::vector<std::vector<double>>& layers) {
  Json out = Json::array();
  for (const auto& layer : layers) {
    const size_t dominant = layer.empty() ? 0 : size_t(diag::dominant_order(layer));
    const size_t n = std::min(layer.size(), std::max<size_t>(31, dominant + 2));
    out.push_back(five_digits(std::vector<double>(layer.begin(), layer.begin() + n)));
  }
  return out;
}

static Json run_json(const RunData& r, const Json& common) {
  constexpr size_t kMost = 100;
  Json settings = changed(r.settings);
  for (const auto& [name, value] : common.items()) settings.erase(name);
  Json out = {{"settings", settings}, {"step", r.step}, {"result", r.result}};
  if (out["result"].is_object()) out["result"].erase("attention");
  if (r.given_up > 0) out["given_up"] = r.given_up;
  if (r.repeated > 0) out["repeated"] = r.repeated;
  out["loss"] = thinned(r.loss, kMost);
  out["gradient"] = thinned(r.gradient, kMost);
  out["validation_loss"] = exact(r.validation_loss);
  out["validation_accuracy"] = exact(r.validation_accuracy);
  if (!r.entropy.empty()) out["entropy"] = five_digits(r.entropy);
  if (!r.separability.empty()) out["separability"] = five_digits(r.separability);
  if (!r.taylor.empty()) out["taylor"] = terms(r.taylor);
  if (!r.heads.is_null()) out["heads"] = r.heads;
  return out;
}

Json to_json(const std::vector<RunData>& runs, const Origin& o) {
  Json common = runs.empty() ? Json::object() : changed(runs[0].settings);
  for (const RunData& r : runs) {
    const Json own = changed(r.settings), before = common;
    for (const auto& [name, value] : before.items())
      if (!own.contains(name) || own[name] != value) common.erase(name);
  }
  Json out = {{kKind, 1}, {"title", o.title}, {"command", o.command}, {"version", o.version}};
  if (!o.added.empty()) out["added"] = o.added;
  out["settings"] = common;
  out["runs"] = Json::array();
  for (const RunData& r : runs) out["runs"].push_back(run_json(r, common));
  return out;
}

static RunData run_of(const Json& j, const Json& common, const std::string& where) {
  RunData r{.folder = where, .settings = {}, .finished = false, .step = 0};
  r.step = j.at("step");
  read_settings(r.settings, common, where);
  read_settings(r.settings, j.at("settings"), where);
  read_result(j.at("result"), r);
  r.given_up = j.value("given_up", int64_t(0)), r.repeated = j.value("repeated", int64_t(0));
  r.loss = points_of(j.at("loss")), r.gradient = points_of(j.at("gradient"));
  r.validation_loss = points_of(j.at("validation_loss"));
  r.validation_accuracy = points_of(j.at("validation_accuracy"));
  r.entropy = values_of(j.value("entropy", Json::array()));
  r.separability = values_of(j.value("separability", Json::array()));
  for (const Json& layer : j.value("taylor", Json::array()))
    r.taylor.push_back(values_of(layer, -INFINITY));
  r.heads = j.value("heads", Json());
  return r;
}

std::vector<RunData> runs_of(const Json& j, const std::string& where) {
  check(j.is_object() && j.contains(kKind) && j[kKind] == 1, where,
        " is not a file of runs: 'horner report DIR --numbers FILE' writes one");
  std::vector<RunData> out;
  try {
    for (const Json& each : j.at("runs")) {
      out.push_back(run_of(each, j.at("settings"), where));
      out.back().folder = where + ", run " + std::to_string(out.size());
    }
  } catch (const Json::exception& e) {
    fail(where, ": run ", out.size() + 1, " is damaged or incomplete: ", files::problem_of(e));
  }
  return out;
}

Origin origin_of(const Json& j, Origin o) {
  o.title = j.value("title", o.title), o.command = j.value("command", o.command);
  o.version = j.value("version", o.version), o.added = j.value("added", o.added);
  return o;
}

bool is_numbers_file(std::string_view text) {
  const size_t at = text.find_first_not_of("{ \n");
  return at != text.npos && text.substr(at).starts_with("\"" + std::string(kKind) + "\"");
}

}  // namespace horner::study

#include "study/study.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <set>

#include "core/check.h"
#include "core/names.h"
#include "files/json.h"
#include "nn/pattern.h"
#include "study/runs.h"
#include "study/tasks.h"

namespace horner::study {

// "a{1..3}b" -> a1b a2b a3b; "{x,y}" -> x y. Expands the first braces and recurses.
static std::vector<std::string> without_braces(const std::string& pattern) {
  const size_t open = pattern.find('{'), close = pattern.find('}', open);
  if (open == pattern.npos) return {pattern};
  check(close != pattern.npos, "'", pattern, "': missing '}'");
  const std::string inside = pattern.substr(open + 1, close - open - 1);
  std::vector<std::string> parts;
  if (const size_t dots = inside.find(".."); dots != inside.npos) {
    const auto number = [&](const std::string& s) {
      int n = -1;
      const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), n);
      check(error == std::errc() && end == s.data() + s.size() && n >= 0 && n <= 1000, "'", pattern,
            "': a range must look like {1..10}, with numbers up to 1000");
      return n;
    };
    const int from = number(inside.substr(0, dots)), to = number(inside.substr(dots + 2));
    check(from <= to, "'", pattern, "': the range is empty");
    for (int n = from; n <= to; ++n) parts.push_back(std::to_string(n));
  } else {
    for (size_t at = 0; at <= inside.size();) {
      const size_t comma = std::min(inside.find(',', at), inside.size());
      parts.push_back(inside.substr(at, comma - at));
      at = comma + 1;
    }
  }
  std::vector<std::string> out;
  for (const std::string& part : parts)
    for (const std::string& s :
         without_braces(pattern.substr(0, open) + part + pattern.substr(close + 1)))
      out.push_back(s);
  return out;
}

std::vector<std::string> expand(const std::vector<std::string>& patterns) {
  std::vector<std::string> out;
  const auto add = [&](const std::string& name) {
    if (std::find(out.begin(), out.end(), name) == out.end()) out.push_back(name);
  };
  for (const std::string& pattern : patterns)
    for (const std::string& plain : without_braces(pattern)) {
      if (plain.find(',') != plain.npos) {  // a list of changes, or of the variants of layers
        std::vector<std::string> turn = nn::pattern(plain);
        for (std::string& variant : turn) variant = attn::find(variant).name;
        add(nn::pattern_text(turn));
        continue;
      }
      for (const attn::Variant& v : attn::matching(plain)) add(v.name);
    }
  return out;
}

static void check_fields(const Json& j, const std::vector<std::string>& known,
                         const std::string& where) {
  check(j.is_object(), where, " must be a JSON object");
  for (const auto& [name, value] : j.items())
    check(std::find(known.begin(), known.end(), name) != known.end(), where, ": no field '", name,
          "'; possible: ", quoted(known));
}

template <class T>
static std::vector<T> list(const Json& j, const char* name, const std::string& where) {
  check(j.contains(name), where, ": '", name, "' is missing");
  try {
    return j[name].is_array() ? j[name].get<std::vector<T>>() : std::vector<T>{j[name].get<T>()};
  } catch (const Json::exception&) {
    fail(where, ": invalid value ", j[name].dump(), " of '", name, "'");
  }
}

// A list in the list of variants is the pattern of one model.
static Json with_patterns(Json variants) {
  if (variants.is_array())
    for (Json& each : variants)
      if (each.is_array()) each = nn::pattern_text(nn::pattern(each));
  return variants;
}

static std::string folder_name(const std::string& text) {
  std::string out = text;
  for (char& c : out)
    if (!std::isalnum(static_cast<unsigned char>(c)) && !std::strchr("._@=+-", c)) c = '-';
  return out;
}

// How the sweep of learning rates continues: "extend-rates" and "give-up".
static void read_sweep(const Json& j, const std::string& where, Study& s) {
  const Json most = j.value("extend-rates", Json(s.extend_rates));
  check(most.is_number_unsigned() && most.get<size_t>() <= 10, where,
        ": 'extend-rates' must be an integer from 0 to 10, not ", most.dump());
  s.extend_rates = most;
  if (!j.contains("give-up")) return;
  check_fields(j["give-up"], {"after", "behind"}, where + ": 'give-up'");
  const Json after = j["give-up"].value("after", Json()), by = j["give-up"].value("behind", Json());
  check(after.is_number() && after > 0 && after < 1 && by.is_number() && by >= 0, where,
        ": 'give-up' must be like {\"after\": 0.5, \"behind\": 0.2}: shares of the steps, above 0 "
        "and below 1, and of the loss, not ",
        j["give-up"].dump());
  s.give_up = {after, by};
}

// Each run has a folder of its own, and reports read runs with equal settings as one run.
static void check_different(const std::vector<Run>& runs, const std::string& where) {
  std::set<std::string> names;
  std::map<std::string, std::string> by_settings;
  for (const Run& r : runs) {
    check(names.insert(r.name).second, where, ": two runs have the name ", r.name);
    const auto [other, fresh] = by_settings.emplace(identity(r.settings).dump(), r.name);
    check(fresh, where, ": ", other->second, " and ", r.name, " have the same settings: 'size' is ",
          "only a name, and reports take runs that differ in 'steps', paths of data or what a "
          "resumed run may change for copies of one; change another of the 'settings' of one task, "
          "or remove it");
  }
}

Study read_study(const Json& j, const std::string& where, const std::filesystem::path& out) {
  check_fields(j,
               {"title", "about", "attention", "seeds", "learning-rates", "extend-rates", "give-up",
                "settings", "attention-settings", "diagnose", "tasks"},
               where);
  Study s{.title = j.value("title", std::string("A study")),
          .about = j.value("about", std::string()),
          .runs = {}};
  read_sweep(j, where, s);
  const std::vector<int64_t> diagnosed =
      j.contains("diagnose") ? list<int64_t>(j, "diagnose", where) : std::vector<int64_t>();
  for (const int64_t length : diagnosed)
    check(length >= 32, where, ": 'diagnose' must have lengths of at least 32 tokens, not ",
          length);
  const Json own = j.value("attention-settings", Json::object());
  check(own.is_object(), where, ": 'attention-settings' must be a JSON object, such as ",
        R"({"*gate*": {"clip": 1}})");
  check(j.contains("tasks") && j["tasks"].is_array() && !j["tasks"].empty(), where,
        ": 'tasks' must be a list such as [{\"task\": \"text\"}]");
  std::set<std::string> unused;
  for (const auto& [pattern, settings] : own.items()) unused.insert(pattern);
  std::vector<std::pair<uint64_t, Run>> runs;
  for (const Json& given : j["tasks"]) {
    Json t = given.is_string() ? Json{{"task", given}} : given;
    check_fields(t, {"task", "size", "settings", "attention", "seeds", "learning-rates"},
                 where + ": a task");
    const std::string task = t.value("task", std::string("text"));
    find_task(task);
    for (const char* name : {"attention", "seeds", "learning-rates"})
      if (!t.contains(name) && j.contains(name)) t[name] = j[name];
    if (!t.contains("seeds")) t["seeds"] = {0};
    if (t.contains("attention")) t["attention"] = with_patterns(t["attention"]);
    std::vector<Json> rates = {Json()};  // null: that of the settings
    if (t.contains("learning-rates")) rates = list<Json>(t, "learning-rates", where);
    const auto add = [&](const std::string& attention, const Json& rate, uint64_t seed) {
      Run r{.diagnose = diagnosed};
      const std::string size = t.value("size", std::string());
      r.name = folder_name(task) + (size.empty() ? "" : "/" + folder_name(size)) + "/" +
               folder_name(attention) + (rate.is_null() ? "" : "/lr" + rate.dump()) + "/seed" +
               std::to_string(seed);
      for (const Json* from : {&j, const_cast<const Json*>(&t)})
        if (from->contains("settings")) read_settings(r.settings, (*from)["settings"], where);
      for (const auto& [pattern, settings] : own.items())
        if (matches(pattern, attention)) {
          read_settings(r.settings, settings, where + ": '" + pattern + "'");
          unused.erase(pattern);
        }
      if (!rate.is_null()) read_settings(r.settings, {{"learning-rate", rate}}, where);
      r.settings.task = task, r.settings.attention = attention, r.settings.seed = seed;
      train::check_settings(r.settings);
      r.folder = out / r.name;
      runs.emplace_back(seed, r);
    };
    for (const std::string& attention : expand(list<std::string>(t, "attention", where)))
      for (const Json& rate : rates)
        for (const uint64_t seed : list<uint64_t>(t, "seeds", where)) add(attention, rate, seed);
  }
  check(unused.empty(), where, ": no variant of the study matches '",
        unused.empty() ? "" : *unused.begin(), "' of 'attention-settings'");
  std::stable_sort(runs.begin(), runs.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [seed, run] : runs) s.runs.push_back(run);
  check_different(s.runs, where);
  return s;
}

Json find_study(const std::string& wanted) {
  std::vector<std::string> names;
  for (const Preset& p : presets()) {
    if (wanted == p.name) return Json::parse(p.json);
    names.push_back(p.name);
  }
  check(std::filesystem::exists(wanted), "no study '", wanted, "': it is neither a preset (",
        quoted(names), ") nor a file");
  return files::read_json(wanted);
}

}  // namespace horner::study

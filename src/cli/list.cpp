// horner list: variants × executions.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "attn/attend.h"
#include "attn/spec_text.h"
#include "cli/command.h"
#include "cli/table.h"
#include "core/check.h"
#include "core/names.h"
#include "instruments/verify.h"

namespace horner::cli {

using Json = nlohmann::ordered_json;

std::vector<attn::Variant> select(const std::vector<std::string>& patterns) {
  const std::vector<attn::Variant> all = attn::variants();
  if (patterns.empty()) return all;
  std::vector<attn::Variant> out;
  auto add = [&](const attn::Variant& v) {
    for (const attn::Variant& had : out)
      if (had.name == v.name) return;
    out.push_back(v);
  };
  for (const std::string& pattern : patterns) {
    if (pattern.find('*') == std::string::npos) {
      add(attn::find(pattern));
      continue;
    }
    bool found = false;
    std::vector<std::string> names;
    for (const attn::Variant& v : all) {
      names.push_back(v.name);
      if (!matches(pattern, v.name)) continue;
      found = true;
      add(v);
    }
    horner::check(found, "no attention variant matches '", pattern, "'; did you mean ",
                  quoted(nearest(pattern, names)), "? ('horner list' shows them all)");
  }
  return out;
}

static std::string shown(const attn::Family& f) {
  return std::string(f.name) + "<n>";
}

static std::vector<attn::Family> families(const std::vector<std::string>& patterns) {
  std::vector<attn::Family> out;
  for (const attn::Family& f : attn::families()) {
    auto fits = [&](const std::string& pattern) { return matches(pattern, shown(f)); };
    if (patterns.empty() || std::any_of(patterns.begin(), patterns.end(), fits)) out.push_back(f);
  }
  return out;
}

// "" or why the execution cannot run small float32 inputs on the CPU.
static std::string why_not(const attn::Variant& v, const attn::Execution& e) {
  const instruments::Case small{.B = 1, .H = 2, .G = 2, .T = 16, .S = 16, .D = 64, .E = 64};
  return e.why_not(v.spec, instruments::random_inputs(v.spec, small));
}

static Json json(const std::vector<attn::Variant>& variants,
                 const std::vector<attn::Family>& families) {
  Json out{{"variants", Json::array()}, {"families", Json::array()}};
  for (const attn::Variant& v : variants) {
    Json runs = Json::object();
    for (const attn::Execution* e : attn::executions()) {
      const std::string reason = why_not(v, *e);
      runs[std::string(e->name)] = reason.empty() ? "yes" : reason;
    }
    out["variants"].push_back({{"name", v.name},
                               {"about", v.about},
                               {"source", v.source},
                               {"aliases", v.aliases},
                               {"spec", attn::text(v.spec)},
                               {"notes", attn::notes(v.spec)},
                               {"executions", runs}});
  }
  for (const attn::Family& f : families)
    out["families"].push_back(
        {{"name", shown(f)}, {"about", f.about}, {"source", f.source}, {"listed", f.listed}});
  return out;
}

// Remarks that many rows share, each printed once below the table.
struct Footnotes {
  bool letters = false;
  std::vector<std::string> all = {};

  std::string mark(const std::string& remark) {
    const auto at = std::find(all.begin(), all.end(), remark);
    const size_t i = size_t(at - all.begin());
    if (at == all.end()) all.push_back(remark);
    return label(i);
  }
  std::string label(size_t i) const {
    return "[" + (letters ? std::string(1, char('a' + i)) : std::to_string(i + 1)) + "]";
  }
  void print() const {
    for (size_t i = 0; i < all.size(); ++i) std::cout << faint(label(i)) << " " << all[i] << "\n";
  }
};

static void print(const std::vector<attn::Variant>& variants,
                  const std::vector<attn::Family>& families) {
  Table table{.head = {"variant", "about"}, .rows = {}};
  for (const attn::Execution* e : attn::executions()) table.head.emplace_back(e->name);
  Footnotes reasons, remarks{.letters = true};
  for (const attn::Variant& v : variants) {
    Row row{v.name, v.about};
    for (const std::string& note : attn::notes(v.spec)) row[0] += " " + faint(remarks.mark(note));
    for (const attn::Execution* e : attn::executions()) {
      const std::string reason = why_not(v, *e);
      row.push_back(reason.empty() ? green("yes") : faint(reasons.mark(reason)));
    }
    table.rows.push_back(row);
  }
  std::cout << text(table, terminal_width());
  if (!reasons.all.empty() || !remarks.all.empty()) std::cout << "\n";
  reasons.print();
  remarks.print();

  if (families.empty()) return;
  Table more{.head = {}, .rows = {}, .indent = 2};
  for (const attn::Family& f : families) more.rows.push_back({shown(f), std::string(f.about)});
  std::cout << "\n" << bold("for every n") << "\n" << text(more, terminal_width());
}

Action list(CLI::App& app) {
  struct Options {
    std::vector<std::string> patterns;
    bool json = false;
  };
  const auto o = std::make_shared<Options>();
  app.add_option("PATTERN", o->patterns,
                 "names to show, in which * stands for any characters [all]")
      ->type_name("");
  app.add_flag("--json", o->json, "the whole table as JSON, reasons in full");
  return [o] {
    const auto variants = select(o->patterns);
    const auto families = cli::families(o->patterns);
    if (o->json)
      std::cout << json(variants, families).dump(2) << "\n";
    else
      print(variants, families);
    return Outcome::fine;
  };
}

}  // namespace horner::cli

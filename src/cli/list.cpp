// horner list: variants × executions.
#include <algorithm>
#include <sstream>

#include "attn/attend.h"
#include "attn/spec_text.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/names.h"
#include "instruments/verify.h"

namespace horner::cli {

std::vector<attn::Variant> select(const std::vector<std::string>& patterns) {
  if (patterns.empty()) return attn::variants();
  std::vector<attn::Variant> out;
  for (const std::string& pattern : patterns)
    for (const attn::Variant& v : attn::matching(pattern)) {
      const auto same = [&](const attn::Variant& had) { return had.name == v.name; };
      if (std::none_of(out.begin(), out.end(), same)) out.push_back(v);
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

struct ListOptions {
  std::vector<std::string> patterns;
  std::string device = "cpu", dtype = "float32";
  bool json = false, verbose = false;
};

struct Listed {
  attn::Variant variant;
  std::vector<std::string> why_not;  // for each execution; "" where it runs
};

// Probes every execution with small inputs of the dtype, on the device.
static std::vector<Listed> probe(const ListOptions& o) {
  instruments::Case small{.B = 1, .H = 2, .G = 2, .T = 16, .S = 16, .D = 64, .E = 64};
  small.dtype = cli::dtype(o.dtype), small.device = cli::device(o.device);
  std::vector<Listed> out;
  for (const attn::Variant& v : select(o.patterns)) {
    const attn::Inputs in = instruments::random_inputs(v.spec, small);
    Listed& row = out.emplace_back(Listed{v, {}});
    for (const attn::Execution* e : attn::executions())
      row.why_not.push_back(e->why_not(v.spec, in));
  }
  return out;
}

static Json json(const std::vector<Listed>& rows, const std::vector<attn::Family>& families) {
  Json out{{"variants", Json::array()}, {"families", Json::array()}};
  for (const auto& [v, why_not] : rows) {
    Json runs = Json::object();
    for (size_t i = 0; i < why_not.size(); ++i)
      runs[std::string(attn::executions()[i]->name)] = why_not[i].empty() ? "yes" : why_not[i];
    out["variants"].push_back({{"name", v.name},
                               {"about", v.about},
                               {"source", v.source},
                               {"aliases", v.aliases},
                               {"mechanism", v.mechanism},
                               {"spec", attn::text(v.spec)},
                               {"notes", attn::notes(v.spec)},
                               {"executions", runs}});
  }
  for (const attn::Family& f : families)
    out["families"].push_back(
        {{"name", shown(f)}, {"about", f.about}, {"source", f.source}, {"listed", f.listed}});
  return out;
}

// The executions that run some row, each with a letter for its column: those of the other device
// would only be a column of reasons.
static std::vector<std::pair<size_t, char>> lettered(const std::vector<Listed>& rows) {
  std::vector<std::pair<size_t, char>> out;
  std::string used;
  for (size_t i = 0; i < attn::executions().size(); ++i) {
    const auto runs = [&](const Listed& row) { return row.why_not[i].empty(); };
    if (std::none_of(rows.begin(), rows.end(), runs)) continue;
    const std::string_view name = attn::executions()[i]->name;
    const size_t at = name.find_first_not_of(used);
    used += name[at];
    out.emplace_back(i, char(std::toupper(name[at])));
  }
  return out;
}

// With -v: each reason once, with the variants that it is true of.
static void print_reasons(const std::vector<Listed>& rows, size_t columns) {
  for (size_t i = 0; i < attn::executions().size(); ++i) {
    std::vector<std::pair<std::string, std::string>> reasons;  // and the names of the variants
    for (const Listed& row : rows) {
      if (row.why_not[i].empty()) continue;
      const auto same = [&](const auto& r) { return r.first == row.why_not[i]; };
      auto at = std::find_if(reasons.begin(), reasons.end(), same);
      if (at == reasons.end()) at = reasons.insert(at, {row.why_not[i], ""});
      at->second += (at->second.empty() ? "" : ", ") + row.variant.name;
    }
    for (const auto& [reason, names] : reasons)
      std::cout << "\n"
                << wrapped(std::string(attn::executions()[i]->name) + " cannot run: " + reason,
                           columns, 0)
                << wrapped(names, columns, 2);
  }
}

static void print(const std::vector<Listed>& rows, const std::vector<attn::Family>& families,
                  const ListOptions& o) {
  constexpr size_t kWidest = 100;
  const size_t terminal = terminal_width();
  const size_t columns = terminal ? std::min(terminal, kWidest) : kWidest;
  const auto letters = lettered(rows);
  Table table{.head = {"variant", "runs", "about"}};
  std::vector<std::string> remarks;
  for (const auto& [v, why_not] : rows) {
    Row row{v.name, "", v.about};
    for (const auto& [i, letter] : letters) row[1] += why_not[i].empty() ? letter : '.';
    for (const std::string& note : attn::notes(v.spec)) {
      auto at = std::find(remarks.begin(), remarks.end(), note);
      if (at == remarks.end()) at = remarks.insert(at, note);
      row[2] += " [" + std::string(1, char('a' + (at - remarks.begin()))) + "]";
    }
    table.rows.push_back(row);
  }
  std::string runs = "runs on " + o.device + " in " + o.dtype + ":";
  for (const auto& [i, letter] : letters)
    runs += "  " + std::string(1, letter) + " " + std::string(attn::executions()[i]->name);
  if (!o.verbose) runs += "  (-v: why not the others)";
  // One table, so that its columns are aligned, in the whole catalog with each mechanism above its
  // rows.
  std::istringstream lines(text(table, columns));
  std::string line, mechanism;
  if (std::getline(lines, line)) std::cout << line << "\n";
  for (size_t i = 0; std::getline(lines, line); ++i) {
    if (o.patterns.empty() && i < rows.size() && rows[i].variant.mechanism != mechanism) {
      mechanism = rows[i].variant.mechanism;
      std::cout << "\n" << bold(mechanism) << "\n";
    }
    std::cout << line << "\n";
  }
  std::cout << "\n" << paragraph(runs);
  for (size_t i = 0; i < remarks.size(); ++i)
    std::cout << paragraph("[" + std::string(1, char('a' + i)) + "] " + remarks[i]);
  if (o.verbose) print_reasons(rows, columns);

  if (families.empty()) return;
  Table more{.indent = 2};
  for (const attn::Family& f : families) more.rows.push_back({shown(f), std::string(f.about)});
  std::cout << "\n" << bold("families, for any order n") << "\n" << text(more, columns);
}

Action list(CLI::App& app) {
  const auto o = std::make_shared<ListOptions>();
  choices(
      option(app, "PATTERN", o->patterns, "", "variants to show; * matches any characters [all]"),
      variant_choices());
  choices(option(app, "--device", o->device, "NAME", "the device to probe [cpu]"),
          {device_names()});
  choices(option(app, "--dtype", o->dtype, "NAME", "the dtype to probe [float32]"),
          {dtype_names()});
  app.add_flag("-v,--verbose", o->verbose, "say why an execution cannot run a variant");
  app.add_flag("--json", o->json, "the whole table as JSON, with every reason");
  return [o] {
    const std::vector<Listed> rows = probe(*o);
    const auto families = cli::families(o->patterns);
    if (o->json) return print_json(json(rows, families));
    print(rows, families, *o);
    return Outcome::fine;
  };
}

}  // namespace horner::cli

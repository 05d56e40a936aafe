// horner check: every variant × execution × dtype against the reference in double.
#include "cli/check.h"

#include <cmath>
#include <map>
#include <optional>

#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "instruments/verify.h"

namespace horner::cli {

struct Finding {
  instruments::Difference difference;
  instruments::Case on;

  double excess() const {
    return difference.ok() ? difference.error / difference.allowed : INFINITY;
  }
};

// The result of one variant, execution and dtype.
struct Cell {
  std::string dtype;
  size_t ran = 0;
  bool whole = true;  // false: interrupted by Ctrl-C
  std::optional<Finding> worst = {};
  std::vector<Finding> failures = {};  // the worst of each case that failed
  std::vector<std::pair<instruments::Case, std::string>> skipped = {};  // and why
};

struct CheckedRow {
  attn::Variant variant;
  const attn::Execution* execution;
  std::vector<Cell> cells;
};

static Cell check_one(const attn::Variant& v, const attn::Execution& e,
                      const std::string& dtype_name, const CheckOptions& o) {
  Cell cell{.dtype = dtype_name};
  for (instruments::Case c :
       instruments::standard_cases(dtype(dtype_name), device(o.device), uint64_t(o.seed))) {
    if (stopped()) {
      cell.whole = false;
      break;
    }
    c.gradients = !o.forward_only;
    const instruments::Verdict verdict = instruments::verify(v.spec, e, c);
    if (!verdict.why_not.empty()) {
      cell.skipped.emplace_back(c, verdict.why_not);
      continue;
    }
    ++cell.ran;
    const Finding found{*verdict.worst(), c};
    if (!verdict.ok()) cell.failures.push_back(found);
    if (!cell.worst || found.excess() > cell.worst->excess()) cell.worst = found;
  }
  return cell;
}

std::vector<const attn::Execution*> selected_executions(const CheckOptions& o) {
  std::vector<const attn::Execution*> executions;
  for (const std::string& name : o.executions) executions.push_back(&attn::execution(name));
  if (executions.empty()) executions.assign(attn::executions().begin(), attn::executions().end());
  return executions;
}

static std::vector<CheckedRow> check_all(const CheckOptions& o) {
  const std::vector<attn::Variant> variants = select(o.variants);
  const std::vector<const attn::Execution*> executions = selected_executions(o);
  for (const std::string& name : o.dtypes) (void)dtype(name);
  (void)device(o.device);

  std::vector<CheckedRow> rows;
  Progress progress{.command = "check",
                    .all = variants.size() * executions.size() * o.dtypes.size()};
  for (const attn::Variant& v : variants)
    for (const attn::Execution* e : executions) {
      if (stopped()) return rows;
      CheckedRow& row = rows.emplace_back(v, e, std::vector<Cell>());
      for (const std::string& name : o.dtypes) {
        if (stopped()) break;
        progress.show(v.name + " " + std::string(e->name) + " " + name);
        row.cells.push_back(check_one(v, *e, name, o));
      }
    }
  return rows;
}

static std::string reproduce(const CheckedRow& row, const Cell& cell, const CheckOptions& o) {
  const std::string &name = row.variant.name, quote = name.find('(') == name.npos ? "" : "'";
  return "horner check --variant " + quote + name + quote + " --execution " +
         std::string(row.execution->name) + " --dtype " + cell.dtype +
         (o.device == "cpu" ? "" : " --device " + o.device) +
         (o.forward_only ? " --forward-only" : "") + " --seed " + std::to_string(o.seed);
}

static std::string cell_text(const Cell& cell) {
  if (!cell.failures.empty()) return red("FAIL " + formatted("%.1f", cell.worst->difference.ratio));
  if (!cell.whole) return faint("interrupted");
  if (!cell.worst) return faint("–");
  return green("ok") + " " + formatted("%.1f", cell.worst->difference.ratio);
}

static std::string finding_text(const Finding& f) {
  return f.difference.of + ": error " + formatted("%.2e", f.difference.error) + ", allowed " +
         formatted("%.2e", f.difference.allowed) + ", on " + text(f.on);
}

static std::string title(const CheckedRow& row, const Cell& cell) {
  return row.variant.name + " · " + std::string(row.execution->name) + " · " + cell.dtype;
}

static void print_failure(const CheckedRow& row, const Cell& cell, const CheckOptions& o) {
  constexpr size_t kMost = 3;
  std::cout << "\n" << red("FAIL") << " " << bold(title(row, cell)) << "\n";
  for (size_t i = 0; i < cell.failures.size() && (i < kMost || o.verbose); ++i)
    std::cout << "  " << finding_text(cell.failures[i]) << "\n";
  if (cell.failures.size() > kMost && !o.verbose)
    std::cout << "  and " << cell.failures.size() - kMost << " more cases (-v shows them)\n";
  std::cout << "  " << reproduce(row, cell, o) << "\n";
}

static void print_details(const CheckedRow& row, const Cell& cell) {
  std::cout << "\n" << bold(title(row, cell)) << "\n";
  if (cell.worst) std::cout << "  worst " << finding_text(*cell.worst) << "\n";
  std::map<std::string, std::vector<std::string>> reasons;
  for (const auto& [on, why] : cell.skipped) reasons[why].push_back(text(on));
  for (const auto& [why, cases] : reasons)
    std::cout << "  cannot run " << cases.size() << (cases.size() == 1 ? " case: " : " cases: ")
              << why << "\n";
}

static void print(const std::vector<CheckedRow>& rows, const CheckOptions& o) {
  Table table{.head = {"variant", "execution"}, .keys = 2};
  table.head.insert(table.head.end(), o.dtypes.begin(), o.dtypes.end());
  size_t ok = 0, failed = 0, cannot = 0;
  for (const CheckedRow& row : rows) {
    Row& cells = table.rows.emplace_back(Row{row.variant.name, std::string(row.execution->name)});
    for (const Cell& cell : row.cells) {
      cells.push_back(cell_text(cell));
      failed += !cell.failures.empty();
      ok += cell.failures.empty() && cell.whole && cell.worst;
      cannot += cell.failures.empty() && cell.whole && !cell.worst;
    }
  }
  std::cout << text(table);
  for (const CheckedRow& row : rows)
    for (const Cell& cell : row.cells) {
      if (!cell.failures.empty()) print_failure(row, cell, o);
      if (o.verbose && cell.failures.empty()) print_details(row, cell);
    }
  std::cout << "\n"
            << (stopped() ? "interrupted; so far " : "") << ok << " ok, " << failed << " failed, "
            << cannot << " cannot run" << (cannot && !o.verbose ? " (-v: why)" : "") << "\n"
            << faint(paragraph("the number: worst error over the reference's own error in the same "
                               "dtype"));
}

static Json json(const Finding& f) {
  return {{"of", f.difference.of},
          {"error", f.difference.error},
          {"allowed", f.difference.allowed},
          {"ratio", f.difference.ratio},
          {"case", text(f.on)}};
}

static Json json(const CheckedRow& row, const Cell& cell, const CheckOptions& o) {
  Json failures = Json::array(), skipped = Json::array();
  for (const Finding& f : cell.failures) failures.push_back(json(f));
  for (const auto& [on, why] : cell.skipped) skipped.push_back({{"case", text(on)}, {"why", why}});
  const char* result = !cell.failures.empty() ? "FAIL"
                       : !cell.whole          ? "stopped"
                       : cell.worst           ? "ok"
                                              : "cannot run";
  return {{"variant", row.variant.name},
          {"execution", row.execution->name},
          {"dtype", cell.dtype},
          {"result", result},
          {"cases", cell.ran},
          {"worst", cell.worst ? json(*cell.worst) : Json()},
          {"failures", failures},
          {"skipped", skipped},
          {"reproduce", reproduce(row, cell, o)}};
}

static Json json(const std::vector<CheckedRow>& rows, const CheckOptions& o, bool failed) {
  Json results = Json::array();
  for (const CheckedRow& row : rows)
    for (const Cell& cell : row.cells) results.push_back(json(row, cell, o));
  return {{"ok", !failed},  {"stopped", stopped()},         {"device", o.device},
          {"seed", o.seed}, {"gradients", !o.forward_only}, {"results", results}};
}

static Outcome run(CheckOptions o) {
  catch_interrupt();
  if (o.mutants) return check_mutants(o);
  if (o.dtypes.empty()) o.dtypes = {"float32", "float64", "bfloat16"};
  const std::vector<CheckedRow> rows = check_all(o);
  bool failed = false;
  for (const CheckedRow& row : rows)
    for (const Cell& cell : row.cells) failed = failed || !cell.failures.empty();
  if (o.json)
    std::cout << json(rows, o, failed).dump(2) << "\n";
  else
    print(rows, o);
  return stopped() ? Outcome::interrupted : failed ? Outcome::failed : Outcome::fine;
}

Action check(CLI::App& app) {
  const auto o = std::make_shared<CheckOptions>();
  choices(option(app, "--variant", o->variants, "NAME", "variants; * matches any characters [all]"),
          variant_choices());
  choices(option(app, "--execution", o->executions, "NAME", "executions [all]"),
          execution_choices());
  choices(
      option(app, "--dtype", o->dtypes, "NAME", "dtypes of the inputs [float32 float64 bfloat16]"),
      {dtype_names()});
  choices(option(app, "--device", o->device, "NAME", "device to check [cpu]"), {device_names()});
  non_negative(app, "--seed", o->seed, "N", "seed of the random inputs [0]");
  CLI::Option* forward =
      app.add_flag("--forward-only", o->forward_only, "check outputs only, not gradients");
  app.add_flag("--mutants", o->mutants,
               "put faults into the executions, in all four dtypes, and check that each is noticed")
      ->excludes(forward);
  app.add_flag("--json", o->json, "print every result as JSON");
  app.add_flag("-v,--verbose", o->verbose,
               "print the worst difference of each cell, and why some cannot run");
  return [o] { return run(*o); };
}

}  // namespace horner::cli

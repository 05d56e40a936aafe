// horner check --mutants: every fault × execution × dtype. The check has to notice it.
#include <algorithm>
#include <map>

#include "attn/inputs.h"
#include "cli/check.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "instruments/mutants.h"

namespace horner::cli {

using instruments::Mutant;

// One mutant of one execution, on one variant in one dtype; `mutant` is null for the execution as
// it is.
struct Tried {
  const Mutant* mutant;
  std::string variant, execution, dtype;
  instruments::Hunt hunt;

  bool ok() const { return mutant ? !hunt.caught.empty() : hunt.caught.empty(); }
};

// The execution without a fault: `caught` is then a false alarm.
static instruments::Hunt unmutated(const attn::Execution& e,
                                   const std::vector<instruments::Trial>& trials) {
  static const Mutant none{"none", "no fault", "", {}};
  return instruments::hunt(none, e, trials, false);
}

static bool names(const Mutant& m, const std::string& variant) {
  const std::vector<std::string> all = instruments::variants_of(m);
  return std::ranges::find(all, variant) != all.end();
}

// The variants that the table names, or those of the options.
static std::vector<attn::Variant> variants_to_try(const CheckOptions& o) {
  if (!o.variants.empty()) return select(o.variants);
  std::vector<std::string> named;
  for (const Mutant& m : instruments::mutants())
    for (const std::string& v : instruments::variants_of(m))
      if (std::ranges::find(named, v) == named.end()) named.push_back(v);
  return select(named);
}

static void try_execution(const attn::Variant& v, const attn::Execution& e,
                          const std::string& dtype, const std::vector<instruments::Trial>& trials,
                          const CheckOptions& o, std::vector<Tried>& out) {
  auto add = [&](const Mutant* m, const instruments::Hunt& h) {
    if (h.ran > 0) out.push_back({m, v.name, std::string(e.name), dtype, h});
    return h.ran > 0;
  };
  if (!add(nullptr, unmutated(e, trials))) return;
  for (const Mutant& m : instruments::mutants()) {
    if (stopped()) return;
    if (!o.variants.empty() || names(m, v.name)) add(&m, instruments::hunt(m, e, trials, true));
  }
}

static std::vector<Tried> try_all(const CheckOptions& o) {
  const std::vector<attn::Variant> variants = variants_to_try(o);
  const std::vector<const attn::Execution*> executions = selected_executions(o);
  for (const std::string& name : o.dtypes) (void)dtype(name);
  std::vector<Tried> out;
  Progress progress{.command = "check", .all = variants.size() * o.dtypes.size()};
  for (const attn::Variant& v : variants)
    for (const std::string& name : o.dtypes) {
      progress.show(v.name + " " + name);
      const instruments::Case small{.dtype = dtype(name), .device = device(o.device)};
      const attn::Inputs in = instruments::random_inputs(v.spec, small);
      const auto runs = [&](const attn::Execution* e) { return e->why_not(v.spec, in).empty(); };
      if (std::ranges::none_of(executions, runs)) continue;
      const std::vector<instruments::Trial> trials =
          instruments::trials(v.spec, dtype(name), device(o.device), uint64_t(o.seed));
      for (const attn::Execution* e : executions) {
        if (stopped()) return out;
        try_execution(v, *e, name, trials, o, out);
      }
    }
  return out;
}

static std::string reproduce(const Tried& t, const CheckOptions& o) {
  return "horner check --mutants --variant " + t.variant + " --execution " + t.execution +
         " --dtype " + t.dtype + (o.device == "cpu" ? "" : " --device " + o.device) + " --seed " +
         std::to_string(o.seed) + " -v";
}

// The dtypes in which a mutant of an execution was caught, on every variant that was tried.
static std::string cell(const Mutant& m, const std::string& execution,
                        const std::vector<Tried>& all, const CheckOptions& o) {
  std::string out;
  for (const std::string& dtype : o.dtypes) {
    bool any = false, caught = true;
    for (const Tried& t : all)
      if (t.mutant == &m && t.execution == execution && t.dtype == dtype)
        any = true, caught = caught && t.ok();
    if (any) out += (out.empty() ? "" : " ") + (caught ? dtype : red("MISSED " + dtype));
  }
  return out.empty() ? faint("–") : out;
}

static void print(const std::vector<Tried>& all, const CheckOptions& o) {
  std::vector<std::string> executions;
  for (const Tried& t : all)
    if (std::ranges::find(executions, t.execution) == executions.end())
      executions.push_back(t.execution);
  Table table{.head = {"mutant"}};
  table.head.insert(table.head.end(), executions.begin(), executions.end());
  table.head.push_back("by the old rule");
  std::map<std::string, std::pair<int, int>> by_dtype;  // caught by the old rule, tried
  int caught = 0, tried = 0, on_reference = 0, false_alarms = 0;
  for (const Mutant& m : instruments::mutants()) {
    int old = 0, runs = 0;
    for (const Tried& t : all)
      if (t.mutant == &m) {
        ++runs, old += t.hunt.by_old_rule, caught += t.ok(), on_reference += t.hunt.on_reference;
        ++by_dtype[t.dtype].second, by_dtype[t.dtype].first += t.hunt.by_old_rule;
      }
    if (runs == 0) continue;
    tried += runs;
    Row& row = table.rows.emplace_back(Row{m.name});
    for (const std::string& e : executions) row.push_back(cell(m, e, all, o));
    row.push_back(std::to_string(old) + " of " + std::to_string(runs));
  }
  std::cout << text(table);
  for (const Tried& t : all) {
    false_alarms += !t.mutant && !t.ok();
    const std::string where = t.variant + " · " + t.execution + " · " + t.dtype;
    if (!t.ok() && t.mutant)
      std::cout << "\n"
                << red("MISSED") << " " << bold(t.mutant->name) << " (" << t.mutant->about << "), "
                << where << "\n  " << reproduce(t, o) << "\n";
    else if (!t.ok())
      std::cout << "\n"
                << red("FAIL") << " " << bold("without a fault") << ", " << where << ": "
                << t.hunt.caught << "\n  " << reproduce(t, o) << "\n";
    else if (o.verbose && t.mutant)
      std::cout << t.mutant->name << ", " << where << ": by " << t.hunt.caught << "\n";
  }
  std::cout << "\n"
            << (stopped() ? "interrupted; so far " : "") << caught << " of " << tried << " caught ("
            << on_reference << " on the reference), " << false_alarms
            << " false alarms; the old rule caught";
  const char* separator = " ";
  for (const auto& [dtype, counts] : by_dtype) {
    std::cout << separator << counts.first << " of " << counts.second << " in " << dtype;
    separator = ", ";
  }
  std::cout << "\n";
}

static Json json(const std::vector<Tried>& all, const CheckOptions& o, bool failed) {
  Json results = Json::array();
  for (const Tried& t : all)
    results.push_back({{"mutant", t.mutant ? Json(t.mutant->name) : Json()},
                       {"about", t.mutant ? t.mutant->about : "no fault"},
                       {"variant", t.variant},
                       {"execution", t.execution},
                       {"dtype", t.dtype},
                       {"result", !t.mutant ? t.ok() ? "ok" : "FAIL"
                                  : t.ok()  ? "caught"
                                            : "MISSED"},
                       {"by", t.hunt.caught},
                       {"old_rule", t.hunt.by_old_rule},
                       {"on_reference", t.hunt.on_reference},
                       {"cases", t.hunt.ran},
                       {"reproduce", reproduce(t, o)}});
  return {{"ok", !failed},
          {"stopped", stopped()},
          {"device", o.device},
          {"seed", o.seed},
          {"results", results}};
}

Outcome check_mutants(const CheckOptions& given) {
  CheckOptions o = given;
  if (o.dtypes.empty()) o.dtypes = {"float32", "float64", "bfloat16", "float16"};
  const std::vector<Tried> all = try_all(o);
  const bool failed = std::ranges::any_of(all, [](const Tried& t) { return !t.ok(); });
  if (o.json)
    std::cout << json(all, o, failed).dump(2) << "\n";
  else
    print(all, o);
  return stopped() ? Outcome::interrupted : failed ? Outcome::failed : Outcome::fine;
}

}  // namespace horner::cli

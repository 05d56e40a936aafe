// horner bench order: the error of the series of exp against its order, plain and centred.
#include "instruments/bench_order.h"

#include <optional>

#include "cli/bench.h"
#include "cli/options.h"
#include "cli/table.h"
#include "core/check.h"
#include "files/files.h"
#include "report/svg.h"

namespace horner::cli {

void check_bench_options(const CLI::App& app, const std::string& what) {
  std::vector<const char*> useless;
  if (what == "attention") useless = {"--svg", "--force", "--seed", "--model"};
  if (what == "decode")
    useless = {"--seed", "--peers", "--execution", "--forward-only", "--statistics"};
  if (what == "order")
    useless = {"--variant", "--execution",    "--shape",      "--dtype", "--device",
               "--repeats", "--forward-only", "--statistics", "--peers", "--model"};
  if (app.count("--model") > 0 && what == "decode")
    useless.insert(useless.end(), {"--variant", "--shape", "--svg"});
  for (const char* name : useless)
    horner::check(app.count(name) == 0, "bench ", what, " does not take ", name,
                  "; see 'horner bench --help'");
}

static std::string name(const instruments::OrderError& e) {
  return "σ = " + formatted("%g", e.deviation) + (e.centred ? ", centred" : "");
}

static Json json(const instruments::OrderCase& c,
                 const std::vector<instruments::OrderError>& errors) {
  Json results = Json::array();
  for (const instruments::OrderError& e : errors)
    results.push_back(
        {{"variant", (e.centred ? "centred_taylor" : "taylor") + std::to_string(e.order)},
         {"order", e.order},
         {"centred", e.centred},
         {"deviation", e.deviation},
         {"rms", e.rms},
         {"median", e.median}});
  return {{"T", c.T}, {"D", c.D}, {"seed", c.seed}, {"results", results}};
}

// One line for each deviation, plain and centred, in the order of `errors`.
static report::Chart chart(const std::vector<instruments::OrderError>& errors) {
  report::Chart out{.title = "Softmax's series, cut at an order: error on Gaussian scores",
                    .x_label = "order n",
                    .y_label = "relative error of a row (RMS)",
                    .log_y = true};
  for (const instruments::OrderError& e : errors) {
    if (out.series.empty() || out.series.back().name != name(e))
      out.series.push_back({name(e), {}, int(out.series.size() / 2), e.centred});
    out.series.back().points.push_back({double(e.order), e.rms});
  }
  return out;
}

static void print(const instruments::OrderCase& c, const report::Chart& lines) {
  std::cout << "relative error of a row against softmax, RMS over " << c.T << " rows; D " << c.D
            << ", float64, scores of standard deviation σ\n";
  Table table{.head = {"order"}, .right = {0}};
  for (int n = 1; n <= c.highest; ++n) table.rows.push_back({std::to_string(n)});
  for (const report::Series& s : lines.series) {
    table.right.push_back(table.head.size());
    table.head.push_back(s.dashed ? "centred" : s.name);
    for (size_t i = 0; i < s.points.size(); ++i)
      table.rows[i].push_back(formatted("%.1e", s.points[i].y));
  }
  std::cout << text(table);
}

Outcome bench_order(uint64_t seed, const Shown& shown) {
  std::optional<files::NewFile> file;  // fails before the work, not after it
  if (!shown.svg.empty()) file.emplace(shown.svg);
  const instruments::OrderCase c{.seed = seed};
  const std::vector<instruments::OrderError> errors = instruments::order_errors(c);
  const report::Chart lines = chart(errors);
  if (file) file->write(report::chart(lines)), file->commit();
  if (shown.json) return print_json(json(c, errors));
  print(c, lines);
  return Outcome::fine;
}

}  // namespace horner::cli

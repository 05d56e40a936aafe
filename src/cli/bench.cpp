// horner bench: time of each variant × execution, against torch's softmax attention and against the
// matrix-multiply peak of this machine.
#include "instruments/bench.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <charconv>
#include <cstdio>
#include <map>
#include <utility>

#include "attn/inputs.h"
#include "cli/bench.h"
#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "core/machine.h"
#include "files/output.h"

namespace horner::cli {

using instruments::Standing;

struct BenchOptions {
  std::string what;
  std::vector<std::string> variants{"softmax",  "l2",       "taylor2", "taylor4",
                                    "taylor10", "by_count", "gated"};
  std::vector<std::string> executions, dtypes{"float32"}, models;
  std::vector<std::string> shapes{"1,8,1024,64", "1,8,4096,64", "4,16,512,64", "1,8,2048,128"};
  std::string device = "cpu", svg, peers;
  int repeats = 0;
  uint64_t seed = 0;
  bool forward_only = false, statistics = false, force = false, json = false;
};

// The options, resolved.
struct BenchPlan {
  std::vector<attn::Variant> variants;
  std::vector<const attn::Execution*> executions;
  std::vector<instruments::Case> cases;  // a group of rows each
  instruments::Effort effort;
  std::string peers;  // a command
};

struct BenchGroup {
  instruments::Case on;
  std::vector<BenchRow> rows = {};
};

using Peaks = std::map<std::string, double>;  // GFLOP/s of a matrix product, by dtype

// B,H,T,D; the values have the keys' heads, length and channels.
static instruments::Case bench_case(const std::string& shape) {
  constexpr int64_t kMost = 1 << 30;
  instruments::Case c;
  int64_t* const sizes[] = {&c.B, &c.H, &c.T, &c.D};
  const char *at = shape.data(), *const end = at + shape.size();
  for (int64_t* size : sizes) {
    const auto [rest, error] = std::from_chars(at, end, *size);
    const bool whole = size == sizes[3] ? rest == end : rest != end && *rest == ',';
    horner::check(error == std::errc() && whole && *size > 0 && *size <= kMost, "invalid shape '",
                  shape,
                  "'; expected B,H,T,D (batch, heads, tokens, head dimension), such as "
                  "'1,8,1024,64'");
    at = rest + 1;
  }
  c.G = c.H, c.S = c.T, c.E = c.D;
  const double bytes = 16 * double(c.B) * double(c.H) * double(c.T) * double(c.D) * sizeof(double);
  horner::check(bytes < instruments::free_bytes(), "shape '", shape, "' needs about ", bytes / 1e9,
                " GB, but only ", instruments::free_bytes() / 1e9, " GB are free");
  return c;
}

static std::string case_text(const instruments::Case& c) {
  std::ostringstream s;
  s << "B" << c.B << " H" << c.H << " T" << c.T << " D" << c.D << " " << attn::dtype_name(c.dtype);
  return s.str();
}

static BenchPlan plan(const BenchOptions& o) {
  horner::check(o.what == "attention", "unknown benchmark '", o.what,
                "'; expected 'attention', 'decode' or 'order'");
  BenchPlan p{.variants = select(o.variants)};
  for (const std::string& name : o.executions) p.executions.push_back(&attn::execution(name));
  if (o.executions.empty())
    for (const attn::Execution* e : attn::executions())
      if (e->name != "reference" && e->name != "recurrent") p.executions.push_back(e);
  const at::Device device = cli::device(o.device);
  for (const std::string& shape : o.shapes)
    for (const std::string& name : o.dtypes) {
      instruments::Case& c = p.cases.emplace_back(bench_case(shape));
      c.dtype = cli::dtype(name);
      c.device = device;
      c.gradients = !o.forward_only;
    }
  p.peers = o.peers;
  p.effort = {.repeats = o.repeats, .statistics = o.statistics, .stop = [] { return stopped(); }};
  return p;
}

// Measures the peak of a dtype again and keeps the best: the machine may have been busy.
static void measure_peak(const instruments::Case& c, Peaks& peaks) {
  double& best = peaks[attn::dtype_name(c.dtype)];
  best = std::max(best, instruments::matmul_gflops(c.dtype, c.device));
}

static BenchGroup measure(const BenchPlan& p, const instruments::Case& c, Progress& progress) {
  BenchGroup group{.on = c};
  const std::string where = case_text(c) + " ";
  progress.show(where + "torch sdpa");
  BenchRow torch{"torch sdpa", "–",
                 instruments::bench({}, instruments::torch_sdpa, c, p.effort, false)};
  const bool yardstick = torch.result.standing == Standing::right;
  for (std::optional<instruments::Timing>* t : {&torch.result.forward, &torch.result.both})
    if (*t) (*t)->torch_ms = (*t)->ms;
  group.rows.push_back(torch);
  for (const attn::Execution* peer : instruments::peers().subspan(1)) {
    if (!c.device.is_cuda() || stopped()) continue;
    progress.show(where + "torch " + std::string(peer->name));
    group.rows.push_back({"torch " + std::string(peer->name), "–",
                          instruments::bench({}, *peer, c, p.effort, yardstick)});
  }
  if (!p.peers.empty() && !stopped()) {
    progress.show(where + p.peers);
    for (BenchRow& row : peers_of(p.peers, c)) {
      if (yardstick && row.result.forward) row.result.forward->torch_ms = torch.result.forward->ms;
      if (yardstick && row.result.both) row.result.both->torch_ms = torch.result.both->ms;
      group.rows.push_back(std::move(row));
    }
  }
  for (const attn::Variant& v : p.variants)
    for (const attn::Execution* e : p.executions) {
      if (stopped()) return group;
      progress.show(where + v.name + " " + std::string(e->name));
      group.rows.push_back(
          {v.name, std::string(e->name), instruments::bench(v.spec, *e, c, p.effort, yardstick)});
    }
  return group;
}

// Three digits: 0.512, 5.12, 51.2, 512.
static std::string digits(double x) {
  return formatted(x < 1 ? "%.3f" : x < 10 ? "%.2f" : x < 100 ? "%.1f" : "%.0f", x);
}

static std::string bytes_text(int64_t bytes) {
  const double x = double(bytes);
  return x < 1e6   ? digits(x / 1e3) + " KB"
         : x < 1e9 ? digits(x / 1e6) + " MB"
                   : digits(x / 1e9) + " GB";
}

static void add(Row& row, const std::optional<instruments::Timing>& t, double peak) {
  if (!t) return;
  row.push_back(digits(t->ms));
  row.push_back(digits(t->gflops()));
  row.push_back(formatted("%.0f%%", 100 * t->gflops() / peak));
  const double ratio = t->torch_ms ? *t->torch_ms / t->ms : 0;
  const std::string shown = t->torch_ms ? formatted("%.2f", ratio) : "–";
  row.push_back(ratio > 1 ? green(shown) : shown);
}

static bool is_noisy(const instruments::Benchmark& b) {
  for (const std::optional<instruments::Timing>& t : {b.forward, b.both})
    if (t && t->ms > 1.5 * t->best_ms) return true;
  return false;
}

static std::string no_speed(Standing standing) {
  if (standing == Standing::wrong) return red("wrong");
  return faint(standing == Standing::stopped ? "interrupted" : "–");
}

static std::string error_text(const BenchRow& r) {
  const instruments::Difference& d = *r.result.worst;
  return r.execution + " is wrong, " + d.of + " with error " + formatted("%.2e", d.error) +
         ", allowed " + formatted("%.2e", d.allowed);
}

static void print_machine(const BenchOptions& o, const Peaks& peaks) {
  std::string line = processor_name() + ", " + std::to_string(at::get_num_threads()) +
                     " threads, " + std::string(instruments::cpu_kernels());
  if (o.device != "cpu") line += "; on " + o.device;
  const char* before = " · matrix-multiply peak ";
  for (const auto& [dtype, gflops] : peaks)
    line += std::exchange(before, ", ") + digits(gflops) + " GFLOP/s " + dtype;
  std::cout << paragraph(line) << std::flush;
}

// Remarks below a table, each once with the variants it applies to.
struct Remarks {
  std::vector<std::pair<std::string, std::string>> all = {};

  void add(const std::string& remark, const std::string& variant) {
    for (auto& [had, variants] : all)
      if (had == remark) {
        variants += ", " + variant;
        return;
      }
    all.emplace_back(remark, variant);
  }
  void print() const {
    for (const auto& [remark, variants] : all) std::cout << paragraph(remark + ": " + variants);
  }
};

static void print(const BenchGroup& group, const BenchOptions& o, const Peaks& peaks) {
  Table table{.head = {"variant", "execution", "forward ms", "GFLOP/s", "of peak", "× sdpa"},
              .right = {2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
              .keys = 2};
  if (!o.forward_only)
    table.head.insert(table.head.end(), {"fwd+bwd ms", "GFLOP/s", "of peak", "× sdpa"});
  if (o.statistics) table.head.push_back("statistics");
  table.head.push_back("memory");
  Remarks remarks;
  const double peak = peaks.at(attn::dtype_name(group.on.dtype));
  for (const BenchRow& r : group.rows) {
    const Standing standing = r.result.standing;
    if (standing == Standing::cannot_run)
      remarks.add(r.execution + " cannot run, " + r.result.why_not, r.variant);
    if (standing == Standing::cannot_run && o.executions.empty()) continue;
    Row& row = table.rows.emplace_back(Row{r.variant, r.execution});
    if (standing != Standing::right) {
      row.push_back(no_speed(standing));
      if (standing == Standing::wrong) remarks.add(error_text(r), r.variant);
      continue;
    }
    add(row, r.result.forward, peak);
    add(row, r.result.both, peak);
    if (o.statistics)
      row.push_back(r.result.statistics ? formatted("%+.1f%%", 100 * (*r.result.statistics - 1))
                                        : "–");
    row.push_back(bytes_text(r.result.extra_bytes));
    if (is_noisy(r.result))
      remarks.add("noisy, the median over 1.5 times the best run", r.variant + " " + r.execution);
  }
  std::cout << "\n"
            << bold(case_text(group.on)) << faint(" · peak " + digits(peak) + " GFLOP/s") << "\n"
            << text(table);
  remarks.print();
  std::cout << std::flush;
}

static Json json(const std::optional<instruments::Timing>& t, double peak) {
  if (!t) return nullptr;
  Json out{{"ms", t->ms},        {"best_ms", t->best_ms}, {"runs", t->runs},
           {"flop", t->flop},    {"gflops", t->gflops()}, {"share_of_peak", t->gflops() / peak},
           {"sdpa_ms", nullptr}, {"times_sdpa", nullptr}};
  if (t->torch_ms) out["sdpa_ms"] = *t->torch_ms, out["times_sdpa"] = *t->torch_ms / t->ms;
  return out;
}

static Json json(const BenchRow& r, const instruments::Case& on, double peak) {
  static constexpr const char* kStandings[] = {"ok", "wrong", "cannot run", "stopped"};
  const instruments::Benchmark& b = r.result;
  Json check, bytes, statistics;
  if (b.worst)
    check = {{"of", b.worst->of}, {"error", b.worst->error}, {"allowed", b.worst->allowed}};
  if (b.forward) bytes = b.extra_bytes;
  if (b.statistics) statistics = *b.statistics;
  return {{"shape", {{"B", on.B}, {"H", on.H}, {"T", on.T}, {"D", on.D}}},
          {"dtype", attn::dtype_name(on.dtype)},
          {"variant", r.variant},
          {"execution", r.execution == "–" ? "torch" : r.execution},
          {"result", kStandings[size_t(b.standing)]},
          {"why_not", b.why_not},
          {"check", check},
          {"forward", json(b.forward, peak)},
          {"forward_backward", json(b.both, peak)},
          {"times_with_statistics", statistics},
          {"extra_bytes", bytes}};
}

static Json json(const std::vector<BenchGroup>& groups, const BenchOptions& o, const Peaks& peaks) {
  Json results = Json::array();
  for (const BenchGroup& group : groups)
    for (const BenchRow& row : group.rows)
      results.push_back(json(row, group.on, peaks.at(attn::dtype_name(group.on.dtype))));
  return {{"machine",
           {{"cpu", processor_name()},
            {"threads", at::get_num_threads()},
            {"instruction_set", instruments::cpu_kernels()},
            {"torch_kernels", at::get_cpu_capability()},
            {"torch", TORCH_VERSION}}},
          {"device", o.device},
          {"peak_gflops", peaks},
          {"stopped", stopped()},
          {"results", results}};
}

static Outcome run(const BenchOptions& o) {
  const BenchPlan p = plan(o);
  catch_interrupt();
  std::vector<BenchGroup> groups;
  Progress progress{.command = "bench",
                    .all = p.cases.size() * (1 + p.variants.size() * p.executions.size())};
  Peaks peaks;
  for (const instruments::Case& c : p.cases)
    if (!peaks.contains(attn::dtype_name(c.dtype))) measure_peak(c, peaks);
  if (!o.json) print_machine(o, peaks);
  for (const instruments::Case& c : p.cases) {
    if (stopped()) break;
    if (!groups.empty()) measure_peak(c, peaks);
    groups.push_back(measure(p, c, progress));
    progress.clear();
    if (!o.json) print(groups.back(), o, peaks);
  }
  bool failed = false;
  for (const BenchGroup& group : groups)
    for (const BenchRow& row : group.rows)
      failed = failed || row.result.standing == Standing::wrong;
  if (o.json)
    std::cout << json(groups, o, peaks).dump(2) << "\n";
  else
    std::cout << (stopped() ? "\ninterrupted\n" : "\n")
              << faint(paragraph("medians; × sdpa: torch's time over ours, run alternately (above "
                                 "1: faster than torch);") +
                       paragraph("GFLOP/s counts 2 half matrix products forward, 7 "
                                 "forward+backward; memory: peak beyond the inputs"));
  return stopped() ? Outcome::interrupted : failed ? Outcome::failed : Outcome::fine;
}

Action bench(CLI::App& app) {
  const auto o = std::make_shared<BenchOptions>();
  choices(option(app, "WHAT", o->what, "",
                 "attention; decode: time per token at contexts up to T; order: the error of "
                 "softmax's series")
              ->required(),
          {{"attention", "decode", "order"}});
  choices(option(app, "--variant", o->variants, "NAME",
                 "variants; * matches any characters "
                 "[softmax l2 taylor2 taylor4 taylor10 by_count gated]"),
          variant_choices());
  option(app, "--model", o->models, "DIR",
         "decode: models to time instead, after 1,024 to 1,048,576 tokens");
  choices(option(app, "--execution", o->executions, "NAME",
                 "executions [all but reference and recurrent]"),
          execution_choices());
  option(app, "--shape", o->shapes, "B,H,T,D",
         "batch, heads, tokens, head dimension [1,8,1024,64 1,8,4096,64 4,16,512,64 "
         "1,8,2048,128]");
  choices(option(app, "--dtype", o->dtypes, "NAME", "dtypes of the inputs [float32]"),
          {dtype_names()});
  choices(option(app, "--device", o->device, "NAME", "device to time [cpu]"), {device_names()});
  positive(app, "--repeats", o->repeats, "N",
           "timed runs of each row [as many as fit in a second, 3 to 30]");
  app.add_flag("--forward-only", o->forward_only, "time forward only");
  app.add_flag("--statistics", o->statistics, "also time forward with row statistics");
  option(app, "--peers", o->peers, "COMMAND",
         "a command that measures further rows, e.g. 'python bench/peers.py' for "
         "FlexAttention and flash-linear-attention");
  option(app, "--svg", o->svg, "FILE", "write a chart (decode and order)");
  app.add_flag("--force", o->force, "replace FILE even if it is not such a chart");
  non_negative(app, "--seed", o->seed, "N", "random seed (order) [0]");
  app.add_flag("--json", o->json, "print all numbers as JSON");
  return [o, &app] {
    check_bench_options(app, o->what);
    const auto is_chart = [](std::string_view text) {
      return text.starts_with("<svg ") && text.find(R"(font-size="12" fill="#222222">)") < 300;
    };
    if (!o->svg.empty()) files::check_output({.path = o->svg, .ours = is_chart}, o->force);
    if (o->what == "order") return bench_order(o->seed, {o->json, o->svg});
    if (o->what != "decode") return run(*o);
    horner::check(o->dtypes.size() == 1, "bench decode takes exactly one --dtype, got ",
                  o->dtypes.size());
    if (!o->models.empty()) {
      ModelTiming t{.device = cli::device(o->device)};
      if (app.count("--dtype") > 0) t.dtype = cli::dtype(o->dtypes[0]);
      if (o->repeats > 0) t.runs = o->repeats;
      return bench_models(o->models, t, o->json);
    }
    if (app.count("--variant") == 0) o->variants = {"softmax", "taylor2"};
    if (app.count("--shape") == 0) o->shapes = {"1,8,65536,64"};
    horner::check(o->shapes.size() == 1, "bench decode takes exactly one --shape, got ",
                  o->shapes.size());
    instruments::Case c = bench_case(o->shapes[0]);
    c.dtype = cli::dtype(o->dtypes[0]), c.device = cli::device(o->device);
    return bench_decode(select(o->variants), c, o->repeats, {o->json, o->svg});
  };
}

}  // namespace horner::cli

// horner train: trains a model from a preset, a folder or a config.json.
#include <unistd.h>

#include <cmath>
#include <csignal>

#include "cli/options.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "core/stopwatch.h"
#include "files/json.h"
#include "files/output.h"
#include "study/tasks.h"
#include "train/comm.h"
#include "train/trainer.h"

namespace horner::cli {

struct TrainOptions {
  std::map<std::string, std::string> given;  // settings by name, as given
  std::string config, out;
  bool resume = false, either = false, json = false;
};

// An option's value as JSON of the setting's type.
static Json typed(const train::Setting& row, const std::string& text) {
  if (row.at.index() == 0) return text;
  const Json j = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  horner::check(!j.is_discarded(), "--", row.name, " must be ", train::kind(row), ", not '", text,
                "'");
  return j;
}

static train::Settings settings_of(const TrainOptions& o) {
  train::Settings s;
  const std::filesystem::path before = std::filesystem::path(o.out) / "settings.json";
  if ((o.resume || o.either) && std::filesystem::exists(before))
    read_settings(s, files::read_json(before), before.string());
  if (!o.config.empty()) read_settings(s, files::read_json(o.config), o.config);
  for (const train::Setting& row : train::setting_table())
    if (const auto found = o.given.find(row.name); found != o.given.end())
      read_settings(s, {{row.name, typed(row, found->second)}}, "--" + std::string(row.name));
  return s;
}

static std::string line(const train::Progress& p) {
  std::string out = std::to_string(p.step) + "/" + std::to_string(p.steps);
  out += formatted("  loss %.4f", p.loss) + formatted("  gradient norm %.3g", p.norm);
  if (!std::isnan(p.validation_loss)) out += formatted("  validation %.4f", p.validation_loss);
  out += "  " + count_text(std::round(p.tokens_per_second)) + " tokens/s";
  if (!std::isnan(p.share_of_peak)) out += formatted("  %.0f %% of peak", 100 * p.share_of_peak);
  return out + "  " + duration_text(p.seconds_left) + " left";
}

// A progress bar on a terminal; elsewhere a line every ten seconds.
static void show(const train::Progress& p, Stopwatch& since) {
  constexpr size_t kWidth = 20;
  const bool live = isatty(STDERR_FILENO), last = p.step == p.steps;
  if (!last && p.step != 1 && since.ms() < (live ? 100 : 10000)) return;
  since = Stopwatch();
  if (!live) {
    std::cerr << line(p) << "\n";
    return;
  }
  std::string bar;
  for (size_t i = 0; i < kWidth; ++i)
    bar += double(i) < double(p.step) / double(p.steps) * kWidth ? "█" : "░";
  std::cerr << "\r\033[K" << bar << " " << line(p) << std::flush;
}

static void print_settings(const train::Settings& s) {
  const Json j = to_json(s);
  Table t;
  for (const train::Setting& row : train::setting_table()) {
    const Json& x = j[row.name];
    t.rows.push_back({row.name, x == "" ? "-" : x.is_string() ? x.get<std::string>() : x.dump()});
  }
  std::cout << text(t) << std::flush;
}

static Outcome run(const TrainOptions& o) {
  const train::Begin begin = o.either   ? train::Begin::either
                             : o.resume ? train::Begin::resume
                                        : train::Begin::start;
  if (train::ranks_from_environment().world == 1) train::check_folder(o.out, begin);
  if (!o.config.empty())
    files::check_output({.path = std::filesystem::path(o.out) / "settings.json",
                         .ours = [](std::string_view) { return true; },
                         .inputs = {o.config}});
  const train::Settings s = settings_of(o);
  train::check_settings(s);
  const train::Source source = study::make_source(s.task, s.data, s.seed);
  const bool first = train::ranks_from_environment().rank == 0;
  if (!o.json && first) print_settings(s);
  catch_interrupt();
  // torchrun sends SIGTERM to processes that wait for a dead one: those must exit.
  if (train::ranks_from_environment().world == 1) catch_termination();
  Stopwatch since;
  train::Hooks hooks;
  hooks.stop = stopped;
  hooks.measure_peak = isatty(STDERR_FILENO);
  hooks.progress = [&](const train::Progress& p) { show(p, since); };
  hooks.say = [](const std::string& what) {
    std::cerr << (isatty(STDERR_FILENO) ? "\r\033[K" : "") << what << "\n";
  };
  hooks.lost = [](const std::string& reason) {
    std::cerr << "horner: " << reason << std::endl;
    std::_Exit(reason.find("received SIGTERM") == reason.npos ? 2 : 128 + SIGTERM);
  };
  const train::Outcome outcome = train::train(s, source, o.out, begin, hooks);
  if (isatty(STDERR_FILENO) && first) std::cerr << "\n";
  if (!outcome.finished) {
    if (first)
      std::cerr << "interrupted after step " << outcome.step << "; resume with: horner train --out "
                << o.out << " --resume\n";
    return Outcome::interrupted;
  }
  if (!first) return Outcome::fine;
  if (!o.json) std::cout << "done: " << o.out << "/result.json\n";
  return print_json(outcome.result);
}

Action train(CLI::App& app) {
  auto o = std::make_shared<TrainOptions>();
  option(app, "--out", o->out, "DIR", "folder of the run")->required();
  app.add_flag("--resume", o->resume, "resume the run in DIR");
  app.add_flag("--resume-or-start", o->either,
               "resume the run in DIR, or start one if there is none: for jobs that are restarted");
  option(app, "--config", o->config, "FILE", "read settings from a JSON file; options override it");
  app.add_flag("--json", o->json, "print only the result, as JSON");
  const Json defaults = to_json(train::Settings());
  for (const train::Setting& row : train::setting_table()) {
    const std::string name = row.name, range = range_text(row.range);
    const std::string help = row.help + (range.empty() ? "" : " (" + range + ")");
    const Json& value = defaults[name];
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    if (value.is_boolean())
      app.add_flag_function(
          "--" + name + ",!--no-" + name,
          [o, name](int64_t n) { o->given[name] = n > 0 ? "true" : "false"; },
          help + " [" + text + "]");
    else
      app.add_option_function<std::string>(
             "--" + name, [o, name](const std::string& given) { o->given[name] = given; }, help)
          ->take_last()
          ->type_name(text.empty() ? "TEXT" : "[" + text + "]");
  }
  return [o] { return run(*o); };
}

}  // namespace horner::cli

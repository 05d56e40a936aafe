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
#include "nn/config.h"
#include "study/slurm.h"
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

// The line of progress in at most `most` columns (0: no limit): the least important parts go first.
static std::string line(const train::Progress& p, const std::string& bar = "", size_t most = 0) {
  enum : size_t { kBar, kStep, kLoss, kNorm, kValidation, kRate, kPeak, kLeft };
  std::string parts[] = {
      bar,
      std::to_string(p.step) + "/" + std::to_string(p.steps),
      formatted("loss %.4f", p.loss),
      formatted("gradient norm %.3g", p.norm),
      std::isnan(p.validation_loss) ? "" : formatted("validation %.4f", p.validation_loss),
      count_text(std::round(p.tokens_per_second)) + " tokens/s",
      std::isnan(p.share_of_peak) ? "" : formatted("%.0f %% of peak", 100 * p.share_of_peak),
      duration_text(p.seconds_left) + " left"};
  const auto joined = [&] {
    std::string out;
    for (const std::string& part : parts) out += (out.empty() || part.empty() ? "" : "  ") + part;
    return out;
  };
  for (const size_t drop : {kPeak, kBar, kNorm, kRate, kValidation})
    if (most > 0 && width(joined()) > most) parts[drop].clear();
  return fitted(joined(), most);
}

// A progress bar on a terminal; elsewhere a line every ten seconds.
static void show(const train::Progress& p, Stopwatch& since) {
  constexpr size_t kWidth = 20;
  const bool live = cli::live(), last = p.step == p.steps;
  if (!last && p.step != 1 && since.ms() < (live ? 100 : 10000)) return;
  since = Stopwatch();
  if (!live) {
    std::cerr << line(p) << "\n";
    return;
  }
  std::string bar;
  for (size_t i = 0; i < kWidth; ++i)
    bar += double(i) < double(p.step) / double(p.steps) * kWidth ? "█" : "░";
  const size_t columns = terminal_width(STDERR_FILENO);  // the last one would wrap
  std::cerr << "\r\033[K" << line(p, bar, columns > 1 ? columns - 1 : 0) << std::flush;
}

static void print_settings(const train::Settings& s) {
  const Json j = to_json(s);
  Table t{.wrap = true};
  for (const train::Setting& row : train::setting_table()) {
    const Json& x = j[row.name];
    t.rows.push_back({row.name, x == "" ? "-" : x.is_string() ? x.get<std::string>() : x.dump()});
  }
  std::cout << text(t) << std::flush;
}

// The command that resumes the run; the settings are in its folder.
static std::string resume_text(const std::string& out) {
  const train::Ranks r = train::ranks_from_environment();
  const std::string own = "horner train --out " + study::shell_quoted(out) + " --resume";
  if (r.world == 1) return own;
  const bool by_torchrun = std::getenv("TORCHELASTIC_RUN_ID");
  if (!by_torchrun || r.local_world != r.world) return own + ", all processes started as before";
  return "torchrun --standalone --no-python --nproc-per-node=" + std::to_string(r.world) + " " +
         own;
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
  const train::Source source = study::make_source(s.task, s.data, s.seed, s.validation);
  const bool first = train::ranks_from_environment().rank == 0;
  if (!o.json && first) print_settings(s);
  catch_interrupt();
  // Of several, train() handles it: torchrun also sends it to those that wait for a dead one.
  if (train::ranks_from_environment().world == 1) catch_termination();
  Stopwatch since;
  train::Hooks hooks;
  hooks.stop = stopped;
  hooks.measure_peak = isatty(STDERR_FILENO);
  hooks.progress = [&](const train::Progress& p) { show(p, since); };
  hooks.say = [](const std::string& what) {
    std::cerr << (live() ? "\r\033[K" : "") << what << "\n";
  };
  hooks.lost = [](const std::string& reason) {
    std::cerr << "horner: " << reason << std::endl;
    std::_Exit(reason.find("received SIGTERM") == reason.npos ? 2 : 128 + SIGTERM);
  };
  const train::Outcome outcome = train::train(s, source, o.out, begin, hooks);
  if (live() && first) std::cerr << "\n";
  if (!outcome.finished) {
    if (outcome.terminated) stop_as(SIGTERM);
    if (first)
      std::cerr << "interrupted after step " << outcome.step
                << "; resume with: " << resume_text(o.out) << "\n";
    return Outcome::interrupted;
  }
  if (!first) return Outcome::fine;
  if (!o.json) std::cout << "done: " << o.out << "/result.json\n";
  return print_json(outcome.result);
}

// What a setting can be, where its values have names.
static Choices choices_of(const train::Setting& row) {
  const std::string name = row.name;
  if (name == "attention") return variant_choices();
  if (name == "model") return {nn::preset_names()};
  Choices out{row.range.choices};
  if (name == "execution") out = execution_choices(), out.words.insert(out.words.begin(), "auto");
  if (name == "task") {
    out.words = {"text"};
    for (const study::Task& t : study::tasks()) out.words.push_back(t.name);
  }
  return out;
}

// The word for its value in --help.
static std::string word_of(const train::Setting& row) {
  static const char* const kWords[] = {"NAME", "N", "N", "X", "", "JSON"};
  const std::string name = row.name;
  return name == "model"                          ? "MODEL"
         : name == "data" || name == "validation" ? "FILE"
                                                  : kWords[row.at.index()];
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
    const Json& value = defaults[name];
    const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
    const Choices known = choices_of(row);
    std::string help = row.help;
    if (!range.empty() && known.words.empty()) help += " (" + range + ")";
    if (!text.empty()) help += " [" + text + "]";
    if (value.is_boolean())
      app.add_flag_function(
          "--" + name + ",!--no-" + name,
          [o, name](int64_t n) { o->given[name] = n > 0 ? "true" : "false"; }, help);
    else
      choices(
          app.add_option_function<std::string>(
                 "--" + name, [o, name](const std::string& given) { o->given[name] = given; }, help)
              ->take_last()
              ->type_name(word_of(row)),
          known);
  }
  return [o] { return run(*o); };
}

}  // namespace horner::cli

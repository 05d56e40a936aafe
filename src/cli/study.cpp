// horner study: a grid of runs, several at a time, with a live table and a report.
#include "study/study.h"

#include <unistd.h>

#include <set>
#include <thread>

#include "cli/options.h"
#include "cli/report.h"
#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "core/names.h"
#include "core/stopwatch.h"
#include "files/json.h"
#include "files/lock.h"
#include "files/output.h"
#include "study/runner.h"
#include "study/sweep.h"
#include "study/taylor.h"

namespace horner::cli {

namespace fs = std::filesystem;
using study::RunState;
using study::Status;

struct StudyOptions {
  std::string study, out, device, set;
  std::vector<std::string> only;
  size_t jobs = 0;
  double minutes = 0;
  bool list = false, keep_weights = false, force = false, json = false;
};

// Progress of the runs on stderr: a table that is redrawn on a terminal; elsewhere a line when a
// run ends, and one per run every half minute.
struct Live {
  const study::Study& study;
  std::vector<Status> seen;
  size_t lines = 0;
  Stopwatch clock, since;

  Row row(size_t i, const RunState& p) const {
    const int64_t steps = study.runs[i].settings.steps;
    return {study.runs[i].name, std::to_string(p.step) + "/" + std::to_string(steps),
            p.step > 0 ? formatted("%.4f", p.loss) : "",
            p.step > 0 ? count_text(std::round(p.tokens_per_second)) : "",
            p.status == Status::running && p.step > 0 ? duration_text(p.seconds_left) : ""};
  }
  void draw(const std::vector<RunState>& all) {
    Table t{.head = {"run", "step", "loss", "tokens/s", "time left"}, .right = {1, 2, 3, 4}};
    size_t done = 0, failed = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      done += all[i].status == Status::finished || all[i].status == Status::given_up;
      failed += all[i].status == Status::failed;
      if (all[i].status == Status::running) t.rows.push_back(row(i, all[i]));
    }
    std::string out = lines > 0 ? "\033[" + std::to_string(lines) + "A\r\033[J" : "";
    const std::string table =
        t.rows.empty() ? "" : text(t, size_t(std::max(40, int(terminal_width(STDERR_FILENO)) - 1)));
    const std::string status = std::to_string(done) + " of " + std::to_string(all.size()) +
                               " runs done" +
                               (failed ? ", " + red(std::to_string(failed) + " failed") : "") +
                               ", " + duration_text(clock.ms() / 1e3);
    lines = size_t(std::count(table.begin(), table.end(), '\n')) + 1;
    std::cerr << out << table << faint(status) << "\n" << std::flush;
  }
  void show(const std::vector<RunState>& all) {
    const bool live = cli::live();
    seen.resize(all.size(), Status::waiting);
    if (live && since.ms() < 400 && lines > 0) return;
    const bool time = !live && since.ms() > 30000;
    if (live || time) since = Stopwatch();
    for (size_t i = 0; i < all.size(); ++i) {
      const RunState& p = all[i];
      const bool changed = p.here && p.status != seen[i] && p.status != Status::running;
      seen[i] = p.status;
      if (!changed && !(time && p.status == Status::running)) continue;
      if (live && lines > 0) std::cerr << "\033[" << lines << "A\r\033[J", lines = 0;
      static const char* const kWords[] = {"", "", "done", "FAILED", "interrupted", "given up"};
      const Row r = row(i, p);
      std::cerr << r[0] << "  " << r[1];
      if (p.step > 0) std::cerr << "  loss " << r[2] << "  " << r[3] << " tokens/s";
      std::cerr << "  "
                << (p.status != Status::running ? kWords[size_t(p.status)]
                    : p.step > 0                ? r[4] + " left"
                                                : "starting")
                << (p.why.empty() ? "" : ": " + p.why) << "\n";
    }
    if (live) draw(all);
  }
};

// Measures a finished run and removes its checkpoints.
static void tidy(const study::Run& r, bool keep_weights) {
  study::measure_run(r.folder, r.settings);
  if (keep_weights) return;
  for (const auto& entry : fs::directory_iterator(r.folder))
    if (entry.is_directory() && entry.path().filename().string().starts_with("checkpoint-"))
      fs::remove_all(entry.path());
}

// The runs that --only does not name.
static void leave_out(const StudyOptions& o, std::vector<study::Run>& runs) {
  std::erase_if(runs, [&](const study::Run& r) {
    return !o.only.empty() &&
           std::none_of(o.only.begin(), o.only.end(),
                        [&](const std::string& pattern) { return matches(pattern, r.name); });
  });
}

static study::Study prepared(const StudyOptions& o) {
  study::Json j = study::find_study(o.study);
  if (!o.set.empty()) {
    const study::Json more = study::Json::parse(o.set, nullptr, false);
    horner::check(more.is_object(), "--set must be a JSON object such as '{\"steps\": 100}', not '",
                  o.set, "'");
    j["settings"].update(more);
    if (more.contains("learning-rate")) {
      j.erase("learning-rates");
      for (study::Json& task : j["tasks"])
        if (task.is_object()) task.erase("learning-rates");
    }
    for (study::Json& task : j["tasks"])
      if (task.is_object() && task.contains("settings"))
        for (const auto& [name, value] : more.items()) task["settings"].erase(name);
    if (j.contains("attention-settings"))
      for (study::Json& own : j["attention-settings"])
        for (const auto& [name, value] : more.items()) own.erase(name);
  }
  study::Study s = study::read_study(j, o.study, o.out);
  leave_out(o, s.runs);
  horner::check(!s.runs.empty(), "--only matches no run; 'horner study ", o.study,
                " --out DIR --list' lists them");
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  for (study::Run& r : s.runs) {
    if (!o.device.empty()) r.settings.device = o.device;
    if (r.settings.threads == 0) r.settings.threads = int64_t(std::max<size_t>(1, cores / o.jobs));
  }
  return s;
}

static Json summary_json(const study::Study& s, const std::vector<RunState>& all,
                         const report::Report& r, const std::string& page) {
  static const char* const kWords[] = {"waiting", "running",     "finished",
                                       "failed",  "interrupted", "given up"};
  Json runs = Json::array();
  for (size_t i = 0; i < all.size(); ++i)
    runs.push_back({{"name", s.runs[i].name},
                    {"status", kWords[size_t(all[i].status)]},
                    {"step", all[i].step},
                    {"loss", all[i].step > 0 ? Json(all[i].loss) : Json()},
                    {"why", all[i].why}});
  return {{"title", s.title}, {"report", page}, {"findings", r.summary}, {"runs", runs}};
}

// Runs the study, and the runs that its sweeps add to s.runs while a best rate is at an edge.
static std::vector<RunState> run_sweeps(study::Study& s, const StudyOptions& o, Json origin) {
  const Stopwatch clock;
  const std::vector<study::Run> grid = s.runs;
  const auto stop = [&] { return stopped() || (o.minutes > 0 && clock.ms() > o.minutes * 60000); };
  Live live{s};
  std::vector<RunState> all;
  std::set<std::string> added;
  for (std::vector<study::Run> next = grid; !next.empty();) {
    study::check_runs(next);
    const std::vector<RunState> before = all;
    const auto joined = [&](const std::vector<RunState>& now) {
      std::vector<RunState> out = before;
      out.insert(out.end(), now.begin(), now.end());
      return out;
    };
    all = joined(study::run_all(
        next, {.program = fs::read_symlink("/proc/self/exe"),
               .jobs = o.jobs,
               .stop = stop,
               .show = [&](const auto& p) { live.show(joined(p)); },
               .finished = [&](const study::Run& r) { tidy(r, o.keep_weights); },
               .hopeless = [&](const study::Run& r) { return hopeless(r, s.runs, s.give_up); }}));
    if (stop()) break;
    next = study::beyond_edges(grid, s.runs, s.extend_rates);
    leave_out(o, next);
    for (const study::Run& r : next) {
      const std::string rate = fs::path(r.name).parent_path().string();
      if (added.insert(rate).second)
        std::cerr << rate << ": added, because the best learning rate is at the edge of the grid\n";
      s.runs.push_back(r);
    }
    if (next.empty()) break;
    origin["added"] = added;
    files::write_json(fs::path(o.out) / "origin.json", origin);
  }
  return all;
}

static Outcome run(StudyOptions o) {
  if (o.jobs == 0) o.jobs = std::max(1u, std::min(2u, std::thread::hardware_concurrency()));
  study::Study s = prepared(o);
  if (o.list) {
    if (!s.about.empty()) std::cerr << s.about << "\n";
    Json listed = Json::array();
    for (const study::Run& r : s.runs) {
      if (!o.json) std::cout << r.name << (study::is_finished(r) ? "  done" : "") << "\n";
      listed.push_back({{"name", r.name}, {"finished", study::is_finished(r)}});
    }
    return o.json ? print_json({{"title", s.title}, {"runs", listed}}) : Outcome::fine;
  }
  const std::string command = "horner study " + o.study + " --out " + o.out +
                              (o.device.empty() ? "" : " --device " + o.device) +
                              (o.set.empty() ? "" : " --set '" + o.set + "'") + " --jobs " +
                              std::to_string(o.jobs);
  const files::FolderLock lock(o.out);
  if (!lock.warning().empty()) std::cerr << "warning: " << lock.warning() << "\n";
  const auto is_origin = [](std::string_view text) {
    return text.find(R"("command": "horner study )") != text.npos;
  };
  std::vector<fs::path> inputs;
  if (fs::is_regular_file(o.study)) inputs.push_back(o.study);
  files::check_output(
      {.path = fs::path(o.out) / "origin.json", .ours = is_origin, .inputs = inputs}, o.force);
  check_report(o.out, o.force, inputs);
  study::check_runs(s.runs);
  const Json origin = {{"title", s.title}, {"command", command}};
  files::write_json(fs::path(o.out) / "origin.json", origin);
  catch_interrupt();
  catch_termination();
  const std::vector<RunState> all = run_sweeps(s, o, origin);
  const auto count = [&](Status status) {
    return size_t(std::count_if(all.begin(), all.end(),
                                [&](const RunState& p) { return p.status == status; }));
  };
  if (stopped()) {
    std::cerr << "interrupted; run the same command to resume: " << command << "\n";
    return Outcome::interrupted;
  }
  const auto runs = study::read_runs({o.out});
  const report::Report r = study::make_report(runs, origin_of(o.out));
  const std::string page = fs::absolute(write_report(r, o.out)).string();
  if (o.json)
    std::cout << summary_json(s, all, r, page).dump(2, ' ', false, Json::error_handler_t::replace)
              << "\n";
  for (const std::string& sentence : r.summary)
    if (!o.json) std::cout << paragraph("- " + sentence);
  if (!o.json) std::cout << "\nreport: " << page << "\n";
  const size_t failed = count(Status::failed),
               left = count(Status::waiting) + count(Status::stopped);
  if (left > 0)
    std::cerr << left << " of " << all.size() << " runs are left; run the same command to resume\n";
  if (failed > 0)
    std::cerr << failed << " of " << all.size()
              << " runs failed; the log.txt of each has the reason\n";
  return failed > 0 ? Outcome::failed : Outcome::fine;
}

Action study(CLI::App& app) {
  auto o = std::make_shared<StudyOptions>();
  std::string names = "a preset or a JSON file:";
  Choices presets{.shown = false};
  for (const study::Preset& p : study::presets()) {
    names += "\n" + std::string(p.name) + ": " + p.about;
    presets.words.push_back(p.name);
  }
  choices(option(app, "STUDY", o->study, "", names)->required(), presets);
  option(app, "--out", o->out, "DIR", "folder for the runs and the report")->required();
  option(app, "--jobs", o->jobs, "N", "number of concurrent runs [2, or 1 on a single core]")
      ->check(within(1, 1024));
  choices(option(app, "--device", o->device, "NAME", "device of the runs [the study's setting]"),
          {device_names()});
  option(app, "--set", o->set, "JSON",
         "override settings of every run, as JSON: '{\"steps\": 100}'");
  option(app, "--only", o->only, "GLOB",
         "run only those whose names match: '*/seed0' 'text/taylor*'");
  option(app, "--minutes", o->minutes, "N",
         "interrupt the runs after N minutes; run the same command to resume");
  app.add_flag("--list", o->list,
               "describe the study, and list its runs and whether they are done");
  app.add_flag("--force", o->force,
               "replace an origin.json, report.html or report.json that is not of a study");
  app.add_flag("--json", o->json, "print the runs, the findings and the report's path as JSON");
  app.add_flag("--keep-weights", o->keep_weights, "keep the checkpoints of finished runs");
  return [o] { return run(*o); };
}

}  // namespace horner::cli

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
#include "files/files.h"
#include "files/json.h"
#include "files/output.h"
#include "study/heads.h"
#include "study/runner.h"
#include "study/slurm.h"
#include "study/sweep.h"

namespace horner::cli {

namespace fs = std::filesystem;
using study::RunState;
using study::Status;

struct StudyOptions {
  std::string study, out, device, set;
  std::vector<std::string> only;
  size_t jobs = 0;
  double minutes = 0, lease = 60;
  bool list = false, keep_weights = false, force = false, json = false, retry = false;
  bool no_wait = false, slurm = false, dry_run = false;
  study::SlurmJob job = {.array = 0};
  std::string slurm_args;
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
    size_t done = 0, failed = 0, elsewhere = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      done += all[i].status == Status::finished || all[i].status == Status::given_up;
      failed += all[i].status == Status::failed;
      if (all[i].status != Status::running) continue;
      if (all[i].here)
        t.rows.push_back(row(i, all[i]));
      else
        ++elsewhere;
    }
    std::string out = lines > 0 ? "\033[" + std::to_string(lines) + "A\r\033[J" : "";
    const std::string table =
        t.rows.empty() ? "" : text(t, size_t(std::max(40, int(terminal_width(STDERR_FILENO)) - 1)));
    const std::string status = std::to_string(done) + " of " + std::to_string(all.size()) +
                               " runs done" +
                               (elsewhere ? ", " + std::to_string(elsewhere) + " elsewhere" : "") +
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
      if (!changed && !(time && p.here && p.status == Status::running)) continue;
      if (live && lines > 0) std::cerr << "\033[" << lines << "A\r\033[J", lines = 0;
      static const char* const kWords[] = {"to be tried again", "",        "done", "FAILED",
                                           "interrupted",       "given up"};
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

static std::vector<fs::path> checkpoints_of(const study::Run& r) {
  std::vector<fs::path> out;
  for (const auto& entry : fs::directory_iterator(r.folder))
    if (entry.is_directory() && entry.path().filename().string().starts_with("checkpoint-"))
      out.push_back(entry.path());
  return out;
}

// Measures a finished run and removes its checkpoints.
static void tidy(const study::Run& r, bool keep_weights) {
  study::measure_run(r);
  if (keep_weights) return;
  for (const fs::path& checkpoint : checkpoints_of(r)) fs::remove_all(checkpoint);
}

static bool is_tidy(const study::Run& r, bool keep_weights) try {
  return checkpoints_of(r).empty() || (keep_weights && fs::exists(r.folder / "taylor.json"));
} catch (const fs::filesystem_error&) {
  return true;  // another process is at it
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
  const char* const of_slurm = std::getenv("SLURM_CPUS_PER_TASK");
  const size_t cores = of_slurm ? std::strtoul(of_slurm, nullptr, 10)
                                : std::max(1u, std::thread::hardware_concurrency());
  for (study::Run& r : s.runs) {
    if (!o.device.empty()) r.settings.device = o.device;
    if (r.settings.threads == 0) r.settings.threads = int64_t(std::max<size_t>(1, cores / o.jobs));
  }
  return s;
}

static Json summary_json(const study::Study& s, const std::vector<RunState>& all,
                         const std::vector<std::string>& findings, const std::string& page) {
  static const char* const kWords[] = {"waiting", "running",     "finished",
                                       "failed",  "interrupted", "given up"};
  Json runs = Json::array();
  for (size_t i = 0; i < all.size(); ++i)
    runs.push_back({{"name", s.runs[i].name},
                    {"status", kWords[size_t(all[i].status)]},
                    {"step", all[i].step},
                    {"loss", all[i].step > 0 ? Json(all[i].loss) : Json()},
                    {"why", all[i].why}});
  return {{"title", s.title}, {"report", page}, {"findings", findings}, {"runs", runs}};
}

// Who has a run, and since when nothing was heard of it.
static Json standing(const study::Run& r) {
  const study::Seen seen = study::newest_try(r.folder);
  const bool finished = study::is_finished(r);
  const study::Lease& l = seen.lease;
  Json out = {{"name", r.name}, {"finished", finished}, {"state", "waiting"}};
  if (finished)
    out["state"] = "done";
  else if (l.state == "failed" && l.crashes >= study::kMostCrashes)
    out["state"] = "failed";
  else if (l.state == "released" || l.state == "failed")
    out["state"] = "interrupted";
  else if (seen.number > 0)
    out["state"] = "running";
  if (finished || seen.number == 0) return out;
  out["folder"] = seen.folder.string();
  if (!l.why.empty()) out["why"] = l.why;
  if (l.state != "running") return out;
  out["host"] = l.host, out["pid"] = l.pid, out["job"] = l.job;
  if (const double age = study::heartbeat_age(seen.folder); age >= 0) out["heartbeat_age"] = age;
  return out;
}

static std::string standing_text(const Json& j) {
  const std::string state = j["state"];
  if (state == "waiting") return "";
  std::string out = "  " + state;
  if (j.contains("host")) {
    out += " on " + j["host"].get<std::string>() + ", process " + std::to_string(int64_t(j["pid"]));
    if (j["job"] != "") out += ", job " + j["job"].get<std::string>();
    if (j.contains("heartbeat_age"))
      out += ", heartbeat " + duration_text(j["heartbeat_age"]) + " ago";
  }
  return out + (j.contains("why") ? ": " + j["why"].get<std::string>() : "");
}

static Outcome list(const study::Study& s, bool json) {
  if (!s.about.empty()) std::cerr << s.about << "\n";
  Json listed = Json::array();
  for (const study::Run& r : s.runs) {
    listed.push_back(standing(r));
    if (!json) std::cout << r.name << standing_text(listed.back()) << "\n";
  }
  return json ? print_json({{"title", s.title}, {"runs", listed}}) : Outcome::fine;
}

// The words of the command for this study, without those of one process.
static std::vector<std::string> command_words(const StudyOptions& o) {
  std::vector<std::string> out = {"study", o.study, "--out", o.out};
  if (!o.device.empty()) out.insert(out.end(), {"--device", o.device});
  if (!o.set.empty()) out.insert(out.end(), {"--set", o.set});
  return out;
}

static std::string command_text(const StudyOptions& o) {
  std::string out = "horner";
  for (const std::string& word : command_words(o)) out += " " + study::shell_quoted(word);
  return out;
}

// Writes the script of an array job into the folder, and submits it.
static Outcome submit(const StudyOptions& o, const study::Study& s) {
  study::SlurmJob job = o.job;
  job.name = fs::path(o.study).stem().string();
  job.directory = fs::current_path().string();
  job.words = {fs::read_symlink("/proc/self/exe").string()};
  for (const std::string& word : command_words(o)) job.words.push_back(word);
  for (const std::string& pattern : o.only) job.words.insert(job.words.end(), {"--only", pattern});
  job.words.insert(job.words.end(), {"--jobs", std::to_string(o.jobs), "--lease",
                                     formatted("%g", o.lease), "--no-wait"});
  if (o.keep_weights) job.words.push_back("--keep-weights");
  if (!o.slurm_args.empty()) job.more.push_back(o.slurm_args);
  const auto left = std::count_if(s.runs.begin(), s.runs.end(),
                                  [](const study::Run& r) { return !study::is_finished(r); });
  if (job.array == 0) job.array = std::clamp<int64_t>(left, 1, 16);
  const fs::path folder = fs::absolute(o.out) / "slurm", script = folder / "job.sh";
  job.log = (folder / "%A_%a.log").string();
  if (o.dry_run) {
    std::cout << study::slurm_script(job);
    return Outcome::fine;
  }
  study::check_runs(s.runs);
  fs::create_directories(folder);
  files::NewFile file(script);
  file.write(study::slurm_script(job));
  file.commit();
  const std::string number = study::submit(script.string());
  if (o.json) return print_json({{"job", number}, {"script", script.string()}});
  std::cout << "job " << number << ": " << job.array << " tasks for " << left << " of "
            << s.runs.size() << " runs; who runs what: " << command_text(o) << " --list\n";
  return Outcome::fine;
}

// What the report was made from.
static Json made_from(const study::Study& s, const std::vector<RunState>& all) {
  Json out = Json::array();
  for (size_t i = 0; i < all.size(); ++i)
    out.push_back({s.runs[i].name, all[i].status == Status::finished, s.runs[i].settings.steps});
  return out;
}

static Json reported(const fs::path& out) {
  const fs::path file = out / ".reported";
  return fs::exists(file) ? files::read_json(file) : Json();
}

struct Written {
  std::vector<std::string> summary;
  std::string page;
};

static std::string page_in(const fs::path& out) {
  const char* const name = fs::exists(out / "report.html") ? "report.html" : "report.json";
  return fs::absolute(out / name).lexically_normal().string();
}

// In the folder of the lease first: a process that has lost it finds its files gone.
static Written write_report_in(const fs::path& folder, const fs::path& out, const Json& from) {
  const report::Report r = study::make_report(study::read_runs({out}), origin_of(out));
  write_report(r, folder);
  files::write_json(folder / ".reported", from, -1);
  for (const char* name : {"report.json", "report.html", ".reported"})
    if (fs::exists(folder / name)) fs::rename(folder / name, out / name);
  return {r.summary, page_in(out)};
}

// One process at a time, and none if another one has written the same report since this one began,
// when `before` was there.
static Written write_once(const fs::path& out, const Json& from, const Json& before,
                          study::Leases& leases) {
  while (!stopped()) {
    const auto folder = leases.take(out / ".report", leases.look(out / ".report"));
    if (!folder) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      continue;
    }
    try {
      Written written;
      if (reported(out) == from && before != from && fs::exists(out / "report.json"))
        written = {
            files::read_json(out / "report.json").value("summary", std::vector<std::string>()),
            page_in(out)};
      else
        written = write_report_in(*folder, out, from);
      leases.release(*folder);
      return written;
    } catch (const std::exception&) {
      if (leases.holds(*folder)) throw;
    }
  }
  return {};
}

static void check_folder(const StudyOptions& o, const study::Study& s) {
  const auto is_origin = [](std::string_view text) {
    return text.find(R"("command": "horner study )") != text.npos;
  };
  std::vector<fs::path> inputs;
  if (fs::is_regular_file(o.study)) inputs.push_back(o.study);
  files::check_output(
      {.path = fs::path(o.out) / "origin.json", .ours = is_origin, .inputs = inputs}, o.force);
  check_report(o.out, o.force, inputs);
  study::check_runs(s.runs);
}

// Runs the study, and the runs that its sweeps add to s.runs while a best rate is at an edge: every
// process that sees all runs ended adds the same ones.
static std::vector<RunState> run_sweeps(const StudyOptions& o, study::Study& s, Json origin,
                                        study::Leases& leases) {
  const Stopwatch clock;
  const std::vector<study::Run> grid = s.runs;
  const auto stop = [&] { return stopped() || (o.minutes > 0 && clock.ms() > o.minutes * 60000); };
  Live live{s};
  std::vector<RunState> all;
  std::set<std::string> added;
  for (std::vector<study::Run> next = grid; !next.empty();) {
    const std::vector<RunState> before = all;
    const auto joined = [&](const std::vector<RunState>& now) {
      std::vector<RunState> out = before;
      out.insert(out.end(), now.begin(), now.end());
      return out;
    };
    all = joined(study::run_all(
        next, {.program = fs::read_symlink("/proc/self/exe"),
               .jobs = o.jobs,
               .leases = leases,
               .wait = !o.no_wait,
               .stop = stop,
               .show = [&](const auto& p) { live.show(joined(p)); },
               .complete = [&](const study::Run& r) { tidy(r, o.keep_weights); },
               .is_complete = [&](const study::Run& r) { return is_tidy(r, o.keep_weights); },
               .hopeless = [&](const study::Run& r) { return hopeless(r, s.runs, s.give_up); }}));
    const auto is_open = [](const RunState& p) {
      return p.status == Status::running || p.status == Status::waiting;
    };
    if (stop() || std::any_of(all.begin(), all.end(), is_open)) break;
    next = study::beyond_edges(grid, s.runs, s.extend_rates);
    leave_out(o, next);
    for (const study::Run& r : next) {
      const std::string rate = fs::path(r.name).parent_path().string();
      if (added.insert(rate).second)
        std::cerr << rate << ": added, because the best learning rate is at the edge of the grid\n";
      s.runs.push_back(r);
    }
    if (next.empty()) break;
    study::check_runs(next);
    origin["added"] = added;
    files::write_json(fs::path(o.out) / "origin.json", origin);
  }
  return all;
}

static Outcome conclude(const StudyOptions& o, const study::Study& s,
                        const std::vector<RunState>& all, const Written& written) {
  const auto count = [&](Status status) {
    return size_t(std::count_if(all.begin(), all.end(),
                                [&](const RunState& p) { return p.status == status; }));
  };
  if (o.json)
    std::cout << summary_json(s, all, written.summary, written.page)
                     .dump(2, ' ', false, Json::error_handler_t::replace)
              << "\n";
  for (const std::string& sentence : written.summary)
    if (!o.json) std::cout << paragraph("- " + sentence);
  if (!o.json && !written.page.empty()) std::cout << "\nreport: " << written.page << "\n";
  const size_t failed = count(Status::failed), elsewhere = count(Status::running),
               left = count(Status::waiting) + count(Status::stopped);
  if (elsewhere > 0)
    std::cerr << elsewhere << " of " << all.size()
              << " runs are in the hands of other processes; the last one writes the report\n";
  if (left > 0)
    std::cerr << left << " of " << all.size() << " runs are left; run the same command to resume\n";
  if (failed > 0)
    std::cerr << failed << " of " << all.size() << " runs failed " << study::kMostCrashes
              << " times; the log.txt of each has the reason, and --retry tries them again\n";
  return failed > 0 ? Outcome::failed : Outcome::fine;
}

static Outcome run(StudyOptions o) {
  if (o.jobs == 0)
    o.jobs = o.slurm ? 1 : std::max(1u, std::min(2u, std::thread::hardware_concurrency()));
  study::Study s = prepared(o);
  if (o.list) return list(s, o.json);
  if (o.slurm) return submit(o, s);
  check_folder(o, s);
  const fs::path out = o.out, origin = out / "origin.json";
  fs::create_directories(out);
  const Json mine = {{"title", s.title}, {"command", command_text(o)}}, before = reported(out);
  if (!fs::exists(origin) || files::read_json(origin) != mine) files::write_json(origin, mine);
  catch_interrupt();
  catch_termination();
  study::Leases leases(o.lease, o.retry);
  const auto all = run_sweeps(o, s, mine, leases);
  if (stopped()) {
    std::cerr << "interrupted; run the same command to resume: " << command_text(o) << "\n";
    return Outcome::interrupted;
  }
  const auto is = [&](Status status) {
    return std::any_of(all.begin(), all.end(), [&](const auto& p) { return p.status == status; });
  };
  const bool last = !is(Status::running) || is(Status::stopped) || is(Status::waiting);
  return conclude(o, s, all, last ? write_once(out, made_from(s, all), before, leases) : Written());
}

static void add_slurm(CLI::App& app, StudyOptions& o) {
  CLI::Option* const slurm = app.add_flag(
      "--slurm", o.slurm, "submit the study to Slurm as an array job; its tasks share the runs");
  const auto with = [&](CLI::Option* each) { each->needs(slurm); };
  with(option(app, "--array", o.job.array, "N", "tasks of the job [one per run, at most 16]")
           ->check(within(1, 100000)));
  with(option(app, "--time", o.job.time, "T",
              "time limit of a task, which is queued again until the study is done: 4:00:00"));
  with(option(app, "--gpus", o.job.gpus, "G", "GPUs of a task")->check(within(0, 1024)));
  with(option(app, "--cpus-per-task", o.job.cpus, "C", "cores of a task")->check(within(1, 4096)));
  with(option(app, "--partition", o.job.partition, "P", "partition of the cluster"));
  with(option(app, "--slurm-args", o.slurm_args, "TEXT",
              "further options of sbatch: '--mem=16G --account=mine'"));
  with(app.add_flag("--dry-run", o.dry_run, "print the script instead of submitting it"));
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
               "describe the study, and list its runs: done, failed, or who runs them");
  app.add_flag("--no-wait", o->no_wait,
               "end when no run is free, without waiting for those of other processes");
  app.add_flag("--retry", o->retry, "also run what has failed three times");
  option(app, "--lease", o->lease, "SECONDS",
         "without a heartbeat for so long, a run may be taken over by another process [60]")
      ->check(within(1, 86400));
  app.add_flag("--force", o->force,
               "replace an origin.json, report.html or report.json that is not of a study");
  app.add_flag("--json", o->json, "print the runs, the findings and the report's path as JSON");
  app.add_flag("--keep-weights", o->keep_weights, "keep the checkpoints of finished runs");
  add_slurm(app, *o);
  return [o] { return run(*o); };
}

}  // namespace horner::cli

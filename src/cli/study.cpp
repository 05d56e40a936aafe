// horner study: a grid of runs, several at a time, with a live table and a report.
#include "study/study.h"

#include <set>
#include <thread>

#include "cli/options.h"
#include "cli/report.h"
#include "cli/run.h"
#include "cli/study_view.h"
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

static std::string name_of(const StudyOptions& o) {
  return fs::path(o.study).stem().string();
}

// The runs in a folder, until one of them is among `names`: those of earlier versions and those
// that are not finished, too. None where another process moves them meanwhile.
static std::vector<std::string> runs_in(const fs::path& out, const std::set<std::string>& names) {
  std::vector<std::string> found;
  std::error_code moved;  // by another process
  for (fs::recursive_directory_iterator at(out, moved), end; !moved && at != end;
       at.increment(moved)) {
    if (at->path().filename() != "settings.json") continue;
    std::string name = at->path().parent_path().lexically_relative(out).string();
    name = name.substr(0, name.rfind(".try"));
    found.push_back(name);
    if (names.contains(name)) break;
  }
  if (moved) found.clear();
  return found;
}

// A folder has one study: its report compares all runs that are there.
static void check_same_study(const StudyOptions& o, const study::Study& s) {
  const fs::path file = fs::path(o.out) / "origin.json";
  if (o.force || o.list || !fs::is_regular_file(file)) return;
  const Json before = files::read_json(file);
  if (!before.is_object() || !before.contains("title")) return;  // it is not of a study
  const char* const advice =
      "; choose another --out, or add --force, to every process of both, to have them in one "
      "report";
  const std::string title = before.value("title", s.title),
                    name = before.value("study", name_of(o));
  horner::check(title == s.title && name == name_of(o), o.out, " holds the study '", title, "' (",
                name, "), not '", s.title, "' (", name_of(o), ")", advice);
  std::set<std::string> names;
  for (const study::Run& r : s.runs) names.insert(r.name);
  const std::vector<std::string> found = runs_in(o.out, names);
  horner::check(found.empty() || names.contains(found.back()), o.out, " holds runs such as ",
                found.empty() ? "" : found.back(), ", and none of the study '", s.title, "' (",
                name_of(o), "), whose first is ", s.runs.empty() ? "" : s.runs[0].name, advice);
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
  check_same_study(o, s);
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

// The words of the command for this study, without those of one process.
static std::vector<std::string> command_words(const StudyOptions& o) {
  std::vector<std::string> out = {"study", o.study, "--out", o.out};
  if (!o.device.empty()) out.insert(out.end(), {"--device", o.device});
  if (!o.set.empty()) out.insert(out.end(), {"--set", o.set});
  return out;
}

// The words of one process, as given.
static std::vector<std::string> process_words(const StudyOptions& o) {
  std::vector<std::string> out;
  for (const std::string& pattern : o.only) out.insert(out.end(), {"--only", pattern});
  if (o.jobs > 0) out.insert(out.end(), {"--jobs", std::to_string(o.jobs)});
  if (o.lease != StudyOptions().lease || o.slurm)
    out.insert(out.end(), {"--lease", formatted("%g", o.lease)});
  if (o.minutes > 0) out.insert(out.end(), {"--minutes", formatted("%g", o.minutes)});
  const std::pair<bool, const char*> flags[] = {{o.no_wait || o.slurm, "--no-wait"},
                                                {o.keep_weights, "--keep-weights"},
                                                {o.retry, "--retry"},
                                                {o.force, "--force"},
                                                {o.json && !o.slurm, "--json"}};
  for (const auto& [given, word] : flags)
    if (given) out.push_back(word);
  return out;
}

static std::string text_of(const std::vector<std::string>& words) {
  std::string out = "horner";
  for (const std::string& word : words) out += " " + study::shell_quoted(word);
  return out;
}
static std::string command_text(const StudyOptions& o) {
  return text_of(command_words(o));
}

// What resumes the study as this process was started.
static std::string resume_text(const StudyOptions& o) {
  std::vector<std::string> words = command_words(o);
  for (const std::string& word : process_words(o)) words.push_back(word);
  return text_of(words);
}

// Writes the script of an array job into the folder, and submits it.
static Outcome submit(const StudyOptions& o, const study::Study& s) {
  study::SlurmJob job = o.job;
  job.name = name_of(o);
  job.directory = fs::current_path().string();
  job.words = {fs::read_symlink("/proc/self/exe").string()};
  for (const auto& words : {command_words(o), process_words(o)})
    job.words.insert(job.words.end(), words.begin(), words.end());
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
  const auto found = write_study_report(study::read_runs({out}), origin_of(out), folder).found;
  files::write_json(folder / ".reported", from, -1);
  std::vector<std::string> names;
  for (const std::string page : kStudyPages)
    names.insert(names.end(), {page + ".json", page + ".html"});
  names.push_back(".reported");
  for (const std::string& name : names)
    if (fs::exists(folder / name)) fs::rename(folder / name, out / name);
  return {found.summary, page_in(out)};
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
               .gpus = study::visible_gpus(),
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
  const std::string again = resume_text(o);
  if (o.jobs == 0)
    o.jobs = o.slurm ? size_t(std::max<int64_t>(1, o.job.gpus))
                     : std::max(1u, std::min(2u, std::thread::hardware_concurrency()));
  study::Study s = prepared(o);
  if (o.list) return list_runs(s, o.json);
  if (o.slurm) return submit(o, s);
  check_folder(o, s);
  const fs::path out = o.out, origin = out / "origin.json";
  fs::create_directories(out);
  const Json mine = {{"title", s.title}, {"study", name_of(o)}, {"command", command_text(o)}},
             before = reported(out);
  if (!fs::exists(origin) || files::read_json(origin) != mine) files::write_json(origin, mine);
  catch_interrupt();
  catch_termination();
  study::Leases leases(o.lease, o.retry);
  const auto all = run_sweeps(o, s, mine, leases);
  if (stopped()) {
    std::cerr << "interrupted; run the same command to resume: " << again << "\n";
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
  with(option(app, "--gpus", o.job.gpus, "G", "GPUs of a task, each for one run at a time")
           ->check(within(0, 1024)));
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
  option(app, "--jobs", o->jobs, "N",
         "number of concurrent runs [2, or 1 on a single core; with --slurm one per GPU]")
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
  app.add_flag(
      "--force", o->force,
      "replace an origin.json, report.html or report.json that is not of a study; accept a "
      "folder that holds another study");
  app.add_flag("--json", o->json, "print the runs, the findings and the report's path as JSON");
  app.add_flag("--keep-weights", o->keep_weights, "keep the checkpoints of finished runs");
  add_slurm(app, *o);
  return [o] { return run(*o); };
}

}  // namespace horner::cli

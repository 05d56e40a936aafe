#include "study/runner.h"

#include <ATen/Context.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "core/check.h"
#include "core/crc32c.h"
#include "files/json.h"
#include "files/lock.h"
#include "train/start.h"

namespace horner::study {

namespace fs = std::filesystem;

bool is_finished(const Run& r) {
  const fs::path result = r.folder / "result.json";
  std::error_code none;
  if (!fs::exists(result, none)) return false;
  try {
    return files::read_json(result).value("steps", int64_t(0)) >= r.settings.steps;
  } catch (const Error&) {
    if (fs::exists(result, none)) throw;
    return false;  // another process has just moved the folder
  }
}

std::string digest(const train::Settings& s) {
  Json j = to_json(s);
  for (const char* name : {"device", "threads"}) j.erase(name);
  return std::to_string(crc32c(j.dump()));
}

// The run in the folder that its newest try has.
static Run in(const Run& r, const fs::path& folder) {
  return {r.name, folder, r.settings, r.diagnose};
}

void check_runs(const std::vector<Run>& runs) {
  using namespace std::chrono;
  const auto until = steady_clock::now() + seconds(5);
  for (const Run& r : runs) {
    std::string owner;
    while (!(owner = files::owner_of(r.folder)).empty() && steady_clock::now() < until)
      std::this_thread::sleep_for(milliseconds(50));
    check(owner.empty(), r.folder.string(), " is in use by ", owner,
          "; wait until it ends, or choose another --out");
    for (int again = 0;; ++again) {
      const Seen newest = newest_try(r.folder);
      const fs::path folder = newest.number > 0 ? newest.folder : r.folder;
      const bool there = fs::exists(folder);
      try {
        train::check_run(folder, r.settings, train::Begin::either);
        break;
      } catch (const std::exception&) {  // unless another process has just moved the folder
        if (again > 20 || !there || fs::exists(folder)) throw;
      }
    }
  }
}

static constexpr const char* kVisible = "CUDA_VISIBLE_DEVICES";

std::vector<std::string> visible_gpus() {
  std::vector<std::string> out;
  if (const char* const given = std::getenv(kVisible)) {
    std::istringstream all(given);
    for (std::string each; std::getline(all, each, ',');) out.push_back(each);
    return out;
  }
  const int64_t n = at::hasCUDA() ? int64_t(at::getNumGPUs()) : 0;
  for (int64_t i = 0; i < n; ++i) out.push_back(std::to_string(i));
  return out;
}

// This process's environment, with one GPU unless that is "".
static std::vector<std::string> environment(const std::string& gpu) {
  std::vector<std::string> out;
  const std::string name = std::string(kVisible) + "=";
  for (char** each = environ; *each; ++each)
    if (gpu.empty() || !std::string_view(*each).starts_with(name)) out.emplace_back(*each);
  if (!gpu.empty()) out.push_back(name + gpu);
  return out;
}

// The run reads its settings from its folder.
static pid_t start(const Run& r, const fs::path& program, const std::string& gpu) {
  files::write_json(r.folder / "settings.json", to_json(r.settings));
  const std::string out = r.folder.string(), log = (r.folder / "log.txt").string(),
                    path = program.string();
  const char* const arguments[] = {path.c_str(), "train",    "--out",
                                   out.c_str(),  "--resume", nullptr};
  setenv("OMP_WAIT_POLICY", "PASSIVE", 0);  // waiting threads leave the cores to the other runs
  std::vector<std::string> variables = environment(gpu);
  std::vector<char*> with;
  for (std::string& each : variables) with.push_back(each.data());
  with.push_back(nullptr);
  const pid_t parent = getpid(), child = fork();
  check(child >= 0, "cannot start a process: ", std::strerror(errno));
  if (child > 0) return child;
  // A separate process group: the parent alone receives Ctrl-C, and forwards it once.
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGINT);
  if (getppid() != parent) _exit(130);
  const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666);
  if (file >= 0) dup2(file, STDOUT_FILENO), dup2(file, STDERR_FILENO);
  const int nothing = open("/dev/null", O_RDONLY);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);
  execve(path.c_str(), const_cast<char* const*>(arguments), with.data());
  _exit(127);
}

// The last lines of a file.
static std::string tail(const fs::path& path, size_t most) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return "";
  const auto size = size_t(in.tellg());
  in.seekg(std::streamoff(size - std::min(size, most)));
  std::string text(std::min(size, most), '\0');
  in.read(text.data(), std::streamsize(text.size()));
  return size > most ? text.substr(text.find('\n') + 1) : text;
}

static void look(const Run& r, RunState& p) {
  const std::string text = tail(r.folder / "metrics.jsonl", 4096);
  double seconds = 0, lines = 0;  // every line has the same number of tokens
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const Json j = Json::parse(text.begin() + long(at), text.begin() + long(end), nullptr, false);
    at = end + 1;
    if (!j.is_object() || !j.contains("loss") || !j["loss"].is_number()) continue;
    p.step = j.value("step", p.step), p.loss = j["loss"];
    if (const double rate = j.value("tokens_per_second", 0.0); rate > 0)
      seconds += 1 / rate, ++lines;
  }
  p.tokens_per_second = seconds > 0 ? lines / seconds : 0;
  const double left = double((r.settings.steps - p.step) * r.settings.batch * r.settings.length);
  p.seconds_left = p.tokens_per_second > 0 ? left / p.tokens_per_second : 0;
}

static std::string last_words(const Run& r, int status) {
  std::string text = tail(r.folder / "log.txt", 2000);
  while (text.ends_with('\n')) text.pop_back();
  text = text.substr(text.rfind('\n') + 1);
  if (WIFSIGNALED(status)) return std::string("killed by ") + strsignal(WTERMSIG(status));
  return text.empty() ? "exit code " + std::to_string(WEXITSTATUS(status)) : text;
}

std::string why_given_up(const Run& r) {
  const fs::path file = r.folder / "given_up.json";
  return fs::exists(file) ? files::read_json(file).value("why", std::string("unknown")) : "";
}

namespace {

struct Child {
  size_t run;
  fs::path folder;
  std::string gpu;  // "": all that this process sees
};

// What this process knows of all runs, and does.
struct Work {
  const std::vector<Run>& runs;
  const Runner& by;
  std::vector<RunState> all = std::vector<RunState>(runs.size());
  std::map<pid_t, Child> children = {};
  bool stopping = false;
  std::chrono::steady_clock::time_point next_look = {}, next_judgement = {};

  std::string free_gpu() const;
  void finish(size_t i, const fs::path& folder);
  void begin(size_t i, const Seen&);
  void consider(size_t i);
  void look_around();
  void ended(const Child&, int status);
  void judge();
  void give_up(const Child&);
  void poll();
  bool is_over() const;
};

std::string Work::free_gpu() const {
  if (by.gpus.size() < 2) return "";
  const auto runs_on = [&](const std::string& gpu) {
    return std::count_if(children.begin(), children.end(),
                         [&](const auto& c) { return c.second.gpu == gpu; });
  };
  return *std::min_element(by.gpus.begin(), by.gpus.end(),
                           [&](const auto& a, const auto& b) { return runs_on(a) < runs_on(b); });
}

// Of a run that has all its steps.
void Work::finish(size_t i, const fs::path& folder) {
  by.complete(in(runs[i], folder));
  const bool first = by.leases.publish(folder, runs[i].folder);
  all[i].status = Status::finished, all[i].here &= first, all[i].why = "";
  if (first || is_finished(runs[i])) return;
  all[i].status = Status::waiting;  // another process has taken it over
  check(!fs::exists(runs[i].folder), "cannot rename '", folder.string(), "' to '",
        runs[i].folder.string(), "': remove what is there");
}

// Takes a free run, if no other process does, and starts it.
void Work::begin(size_t i, const Seen& seen) {
  const auto folder = by.leases.take(runs[i].folder, seen, digest(runs[i].settings));
  if (!folder) return;
  try {
    all[i].here = true;
    if (is_finished(in(runs[i], *folder))) {
      look(in(runs[i], *folder), all[i]);
      return finish(i, *folder);
    }
    const std::string gpu = free_gpu();
    children[start(in(runs[i], *folder), by.program, gpu)] = {i, *folder, gpu};
    all[i].status = Status::running;
  } catch (const std::exception&) {
    if (by.leases.holds(*folder)) throw;
    all[i].status = Status::waiting, all[i].here = false;
  }
}

void Work::consider(size_t i) {
  RunState& p = all[i];
  p.here = false, p.status = Status::waiting;
  if (!why_given_up(runs[i]).empty()) {
    p.status = Status::given_up;
    return;
  }
  const Seen seen = by.leases.look(runs[i].folder, digest(runs[i].settings));
  // After the look: what is finished by now is not taken for a run that somebody left.
  if (is_finished(runs[i])) {
    if (seen.number == 0 && seen.target && !by.is_complete(runs[i])) begin(i, seen);
    p.status = Status::finished, p.here = false, p.why = "";
    return;
  }
  if (seen.standing == Standing::failed)
    p.status = Status::failed, p.why = seen.lease.why;
  else if (seen.standing == Standing::held)
    p.status = Status::running, p.alive = seen.alive;
  else
    begin(i, seen);
}

// Takes runs until all places are filled: those that crashed before come last.
void Work::look_around() {
  using namespace std::chrono;
  if (stopping || children.size() >= by.jobs || steady_clock::now() < next_look) return;
  next_look = steady_clock::now() + microseconds(int64_t(1e6 * by.leases.poll_seconds()));
  for (const bool crashed : {false, true})
    for (size_t i = 0; i < runs.size() && children.size() < by.jobs; ++i) {
      const bool mine = std::any_of(children.begin(), children.end(),
                                    [&](const auto& c) { return c.second.run == i; });
      const bool settled = all[i].status == Status::finished || all[i].status == Status::failed ||
                           all[i].status == Status::given_up;
      if (!mine && !settled && all[i].why.empty() != crashed) consider(i);
    }
}

// Records how a child ended.
void Work::ended(const Child& c, int status) {
  RunState& p = all[c.run];
  const Run there = in(runs[c.run], c.folder);
  next_look = {};
  if (!by.leases.holds(c.folder)) {  // and what the child did there is the new holder's
    p.status = Status::waiting, p.here = false;
    return;
  }
  look(there, p);
  if (!p.hopeless.empty() && !is_finished(there)) return give_up(c);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  std::string why = last_words(there, status);
  try {
    if (code == 0 && is_finished(there)) return finish(c.run, c.folder);
  } catch (const std::exception& e) {
    why = e.what();
  }
  if (stopping || code == 128 + SIGINT || code == 128 + SIGTERM) {
    by.leases.release(c.folder);
    p.status = stopping ? Status::stopped : Status::waiting;
    return;
  }
  if (!by.leases.holds(c.folder)) {
    p.status = Status::waiting, p.here = false;
    return;
  }
  p.why = why;
  p.status = by.leases.crashed(c.folder, why) < kMostCrashes ? Status::waiting : Status::failed;
}

// Every few seconds, of runs that have validated again.
void Work::judge() {
  using namespace std::chrono;
  if (stopping || steady_clock::now() < next_judgement) return;
  next_judgement = steady_clock::now() + milliseconds(500);
  for (const auto& [child, c] : children) {
    RunState& p = all[c.run];
    if (p.step == p.judged || !p.hopeless.empty()) continue;
    p.judged = p.step;
    p.hopeless = by.hopeless(in(runs[c.run], c.folder));
    if (!p.hopeless.empty()) kill(child, SIGINT);
  }
}

// Of a run that has ended for that reason: others see it as it is, and leave it so.
void Work::give_up(const Child& c) {
  RunState& p = all[c.run];
  files::write_json(c.folder / "given_up.json", {{"step", p.step}, {"why", p.hopeless}});
  p.here &= by.leases.publish(c.folder, runs[c.run].folder);
  p.status = why_given_up(runs[c.run]).empty() ? Status::waiting : Status::given_up;
}

void Work::poll() {
  for (auto it = children.begin(); it != children.end();) {
    const auto [child, c] = *it;
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      it = children.erase(it);
      ended(c, status);
      continue;
    }
    look(in(runs[c.run], c.folder), all[c.run]);
    if (!by.leases.is_held(c.folder)) kill(child, SIGKILL);  // this process was stopped for long
    ++it;
  }
}

bool Work::is_over() const {
  if (!children.empty()) return false;
  return stopping || std::none_of(all.begin(), all.end(), [&](const RunState& p) {
           return p.status == Status::waiting ||
                  (p.status == Status::running && (by.wait || !p.alive));
         });
}

}  // namespace

std::vector<RunState> run_all(const std::vector<Run>& runs, const Runner& by) {
  Work work{runs, by};
  while (true) {
    work.look_around();
    if (work.is_over()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (!work.stopping && by.stop()) {
      work.stopping = true;
      for (const auto& [child, c] : work.children) kill(child, SIGINT);
    }
    work.poll();
    work.judge();
    by.show(work.all);
  }
  return work.all;
}

}  // namespace horner::study

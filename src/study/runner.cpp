#include "study/runner.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <thread>

#include "core/check.h"
#include "core/stopwatch.h"
#include "files/json.h"
#include "files/lock.h"
#include "train/start.h"

namespace horner::study {

namespace fs = std::filesystem;

bool is_finished(const Run& r) {
  const fs::path result = r.folder / "result.json";
  return fs::exists(result) &&
         files::read_json(result).value("steps", int64_t(0)) >= r.settings.steps;
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
    train::check_run(r.folder, r.settings, train::Begin::either);
  }
}

// The run reads its settings from its folder.
static pid_t start(const Run& r, const fs::path& program) {
  fs::create_directories(r.folder);
  files::write_json(r.folder / "settings.json", to_json(r.settings));
  const std::string out = r.folder.string(), log = (r.folder / "log.txt").string(),
                    path = program.string();
  const char* const arguments[] = {path.c_str(), "train",    "--out",
                                   out.c_str(),  "--resume", nullptr};
  setenv("OMP_WAIT_POLICY", "PASSIVE", 0);  // waiting threads leave the cores to the other runs
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
  execv(path.c_str(), const_cast<char* const*>(arguments));
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

bool is_given_up(const Run& r) {
  return fs::exists(r.folder / "given_up.json");
}

// Every few seconds, of a run that has validated again.
static void give_up_hopeless(const Run& r, pid_t child, const Runner& by, RunState& p) {
  if (p.step == p.judged || !p.why.empty()) return;
  p.judged = p.step;
  p.why = by.hopeless(r);
  if (!p.why.empty()) kill(child, SIGINT);
}

// Records how a child ended.
static void ended(const Run& r, int status, bool stopping, RunState& p) {
  look(r, p);
  if (!p.why.empty() && !is_finished(r)) {
    p.status = Status::given_up;
    files::write_json(r.folder / "given_up.json", {{"step", p.step}, {"why", p.why}});
    return;
  }
  p.why.clear();
  const bool fine = WIFEXITED(status) && WEXITSTATUS(status) == 0 && is_finished(r);
  p.status = fine ? Status::finished : stopping ? Status::stopped : Status::failed;
  if (p.status == Status::failed) p.why = last_words(r, status);
}

std::vector<RunState> run_all(const std::vector<Run>& runs, const Runner& by) {
  std::vector<RunState> all(runs.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    if (is_given_up(runs[i])) all[i].status = Status::given_up;
    if (!is_finished(runs[i])) continue;
    all[i].status = Status::finished;
    by.finished(runs[i]);
  }
  std::map<pid_t, size_t> children;
  bool stopping = false;
  size_t next = 0;
  Stopwatch judged;  // since runs were last judged
  constexpr double kJudge = 500;
  while (true) {
    while (!stopping && next < runs.size() && children.size() < by.jobs) {
      const size_t i = next++;
      if (all[i].status != Status::waiting) continue;
      children[start(runs[i], by.program)] = i;
      all[i].status = Status::running, all[i].here = true;
    }
    if (children.empty()) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (!stopping && by.stop()) {
      stopping = true;
      for (const auto& [child, i] : children) kill(child, SIGINT);
    }
    for (auto it = children.begin(); it != children.end();) {
      const auto [child, i] = *it;
      int status = 0;
      if (waitpid(child, &status, WNOHANG) == child) {
        ended(runs[i], status, stopping, all[i]);
        if (all[i].status == Status::finished) by.finished(runs[i]);
        it = children.erase(it);
      } else {
        look(runs[i], all[i]);
        if (!stopping && judged.ms() > kJudge) give_up_hopeless(runs[i], child, by, all[i]);
        ++it;
      }
    }
    if (judged.ms() > kJudge) judged = Stopwatch();
    by.show(all);
  }
  return all;
}

}  // namespace horner::study

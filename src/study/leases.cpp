#include "study/leases.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>

#include "core/check.h"
#include "files/files.h"
#include "files/json.h"
#include "files/lock.h"
#include "train/checkpoint.h"

namespace horner::study {

namespace fs = std::filesystem;
using files::Json;
using Seconds = std::chrono::duration<double>;

static constexpr const char* kTry = ".try";
static constexpr size_t kSize = 4096;  // of a .lease: every heartbeat overwrites it in place

static std::string contents(const fs::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

static std::string text_of(const Lease& l) {
  std::string out = Json{{"host", l.host},       {"pid", l.pid},           {"job", l.job},
                         {"state", l.state},     {"beat", l.beat},         {"seconds", l.seconds},
                         {"crashes", l.crashes}, {"lost", l.lost},         {"from", l.from},
                         {"why", l.why},         {"settings", l.settings}, {"machine", l.machine},
                         {"started", l.started}, {"token", l.token},       {"number", l.number}}
                        .dump(-1, ' ', true, Json::error_handler_t::replace);
  out.resize(std::max(kSize, out.size() + 1), ' ');
  out.back() = '\n';
  return out;
}

// Without a state if the text is not that of a lease.
static Lease read_lease(const std::string& text) {
  const Json j = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!j.is_object()) return {};
  try {
    return {j.at("host"),  j.at("job"),   j.at("machine"),  j.at("pid"),  j.at("started"),
            j.at("token"), j.at("state"), j.at("seconds"),  j.at("beat"), j.at("crashes"),
            j.at("lost"),  j.at("from"),  j.at("settings"), j.at("why"),  j.at("number")};
  } catch (const Json::exception&) {
    return {};
  }
}

// When the process began, in ticks since the machine did; 0 if it is dead.
static int64_t start_time(int64_t pid) {
  const std::string text = contents("/proc/" + std::to_string(pid) + "/stat");
  const size_t name = text.rfind(") ");
  if (name == text.npos) return 0;
  std::istringstream words(text.substr(name + 2));
  std::string word;
  words >> word;
  if (word == "Z" || word == "X") return 0;
  for (int i = 4; i <= 22; ++i) words >> word;
  return std::atoll(word.c_str());
}

static std::string this_machine() {
  char space[64] = "";
  if (::readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) return "";
  std::string boot = contents("/proc/sys/kernel/random/boot_id");
  while (boot.ends_with('\n')) boot.pop_back();
  return boot.empty() ? "" : boot + " " + space;
}

static std::string job_name() {
  const auto get = [](const char* name) {
    const char* const x = std::getenv(name);
    return std::string(x ? x : "");
  };
  const std::string array = get("SLURM_ARRAY_JOB_ID");
  return array.empty() ? get("SLURM_JOB_ID") : array + "_" + get("SLURM_ARRAY_TASK_ID");
}

static Lease mine(double seconds) {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  std::random_device random;
  Lease out{.host = host, .job = job_name(), .machine = this_machine(), .pid = ::getpid()};
  out.started = start_time(out.pid), out.state = "running", out.seconds = seconds;
  for (int i = 0; i < 4; ++i) out.token += std::to_string(random());
  return out;
}

// Whether the holder ran here and is dead, with the training that it started.
static bool is_dead(const Lease& l, const fs::path& folder) {
  return !l.machine.empty() && l.machine == this_machine() && l.started != 0 &&
         start_time(l.pid) != l.started && files::owner_of(folder).empty();
}

static fs::path try_folder(const fs::path& target, int64_t number) {
  return target.string() + kTry + std::to_string(number);
}

// The numbers of all tries, in no order.
static std::vector<int64_t> tries(const fs::path& target) {
  std::vector<int64_t> out;
  std::error_code none;
  const std::string prefix = target.filename().string() + kTry;
  for (fs::directory_iterator it(target.parent_path(), none), end; !none && it != end;
       it.increment(none)) {
    const std::string name = it->path().filename().string();
    if (!name.starts_with(prefix) || name.size() > prefix.size() + 9) continue;
    const std::string digits = name.substr(prefix.size());
    if (!digits.empty() && digits.find_first_not_of("0123456789") == digits.npos)
      out.push_back(std::stoll(digits));
  }
  return out;
}

// A new file, not the one of the holder before. False if the folder has been taken meanwhile.
static bool write_new(const fs::path& folder, const Lease& l) {
  try {
    files::NewFile out(folder / ".lease");
    out.write(text_of(l));
    out.commit();
    return true;
  } catch (const Error&) {
    if (fs::exists(folder)) throw;
    return false;
  }
}

// Of the checkpoints in a folder that another process may take away.
static int64_t newest_step(const fs::path& folder) try {
  const auto newest = train::newest_checkpoint(folder);
  return newest ? train::step_of(*newest) : 0;
} catch (const fs::filesystem_error&) {
  return 0;
}

Seen newest_try(const fs::path& target) {
  const std::vector<int64_t> all = tries(target);
  if (all.empty()) return {};
  Seen out{.standing = Standing::held, .number = *std::max_element(all.begin(), all.end())};
  out.folder = try_folder(target, out.number);
  out.lease = read_lease(contents(out.folder / ".lease"));
  // The last holder's: whoever has just taken the folder has not written its own yet.
  if (out.lease.number != out.number) out.lease.state = "";
  return out;
}

double heartbeat_age(const fs::path& folder) {
  const fs::path probe = folder.string() + ".clock-" + std::to_string(::getpid());
  struct stat now, then;
  const int file = ::open(probe.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return -1;
  const bool known = ::write(file, "\n", 1) == 1 && ::fsync(file) == 0 &&
                     ::fstat(file, &now) == 0 && ::stat((folder / ".lease").c_str(), &then) == 0;
  ::close(file);
  ::unlink(probe.c_str());
  if (!known) return -1;
  return std::max(0.0, double(now.st_mtim.tv_sec - then.st_mtim.tv_sec) +
                           1e-9 * double(now.st_mtim.tv_nsec - then.st_mtim.tv_nsec));
}

Leases::Leases(double seconds, bool retry)
    : seconds_(seconds),
      retry_(retry),
      heart_([this](const std::stop_token& stop) { keep_beating(stop); }) {}

Leases::~Leases() {
  heart_.request_stop();
  wake_.notify_all();
  heart_.join();
  const auto left = held_;
  for (const auto& [folder, lease] : left) release(folder);
}

void Leases::keep_beating(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, stop, Seconds(poll_seconds()), [] { return false; }) &&
         !stop.stop_requested()) {
    std::vector<fs::path> all;
    for (const auto& [folder, lease] : held_) all.push_back(folder);
    for (const fs::path& folder : all) update(folder, "running");
  }
}

// Writes a heartbeat, unless the file is another holder's. With the mutex held. The file of a new
// holder is a new one: what is written to an old one is lost.
bool Leases::update(const fs::path& folder, const std::string& state) {
  const auto at = held_.find(folder);
  if (at == held_.end()) return false;
  Lease& l = at->second;
  std::string text(2 * kSize, '\0');
  const int file = ::open((folder / ".lease").c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0 && errno != ENOENT && errno != ENOTDIR && errno != ESTALE) return true;
  const ssize_t n = file < 0 ? 0 : ::pread(file, text.data(), text.size(), 0);
  text.resize(size_t(std::max<ssize_t>(0, n)));
  const bool still = n < 0 || read_lease(text).token == l.token;
  l.state = state, ++l.beat;
  if (still && n >= 0) {
    text = text_of(l);
    [[maybe_unused]] const ssize_t written = ::pwrite(file, text.data(), text.size(), 0);
  }
  if (file >= 0) ::close(file);
  if (!still || state != "running") held_.erase(folder);
  return still;
}

bool Leases::is_silent(const fs::path& folder, const std::string& text, double limit) {
  const auto now = std::chrono::steady_clock::now();
  const auto [at, fresh] = watched_.try_emplace(folder, Watched{text, 0, false, now});
  Watched& w = at->second;
  if (w.text != text) w = {text, 0, true, now};
  // Of a time in which this process did not look, or the file system did not answer, little counts.
  w.quiet += std::min(Seconds(now - w.last).count(), limit / 4);
  w.last = now;
  return w.quiet >= limit;
}

Seen Leases::look(const fs::path& target, const std::string& settings) {
  Seen out = newest_try(target);
  out.target = fs::exists(target);
  if (out.number == 0) return out;
  const Lease& l = out.lease;
  const bool same = settings == l.settings, again = retry_ && !retried_.contains(target);
  if (l.state == "released")
    out.standing = Standing::free;
  else if (l.state == "failed")
    out.standing = l.crashes >= kMostCrashes && same && !again ? Standing::failed : Standing::free;
  else if (is_dead(l, out.folder) || is_silent(out.folder, contents(out.folder / ".lease"),
                                               l.state.empty() ? seconds_ : l.seconds))
    out.standing = Standing::free;
  else
    out.alive = watched_.at(out.folder).alive;
  return out;
}

// Makes `folder` from what there is. False if another process was faster.
bool Leases::move(const Seen& s, const fs::path& target, const fs::path& folder) {
  if (s.number > 0 || s.target) {
    const fs::path from = s.number > 0 ? s.folder : target;
    if (s.number == 0 && !files::owner_of(target).empty()) return false;  // not of a study
    if (::rename(from.c_str(), folder.c_str()) == 0) {
      ::unlink((folder / ".lock").c_str());  // a training that is stopped may hold it
      return true;
    }
    check(errno == ENOENT || errno == ENOTEMPTY || errno == EEXIST, "cannot rename '",
          from.string(), "' to '", folder.string(), "': ", std::strerror(errno));
    return false;
  }
  fs::create_directories(target.parent_path());
  if (::mkdir(folder.c_str(), 0777) != 0) {
    check(errno == EEXIST, "cannot create '", folder.string(), "': ", std::strerror(errno));
    return false;
  }
  // A slow process may find the name free again: its holder has lost or finished the run.
  if (newest_try(target).number == s.number + 1 && !fs::exists(target)) return true;
  ::rmdir(folder.c_str());
  return false;
}

std::optional<fs::path> Leases::take(const fs::path& target, const Seen& s,
                                     const std::string& settings) {
  if (s.standing != Standing::free) return {};
  const fs::path folder = try_folder(target, s.number + 1);
  if (!move(s, target, folder)) return {};
  watched_.erase(s.folder);
  Lease l = mine(seconds_);
  l.settings = settings, l.number = s.number + 1;
  const bool again = retry_ && retried_.insert(target).second;
  l.from = newest_step(folder);
  if (s.lease.settings == settings && !settings.empty() && !again) {
    l.crashes = s.lease.crashes, l.why = s.lease.why;
    if (s.lease.state == "running" && l.from <= s.lease.from) l.lost = s.lease.lost + 1;
  }
  if (l.lost >= kMostLost) {
    l.state = "failed", l.crashes = kMostCrashes;
    l.why = std::to_string(l.lost) + " processes vanished while they ran it";
  }
  if (!write_new(folder, l) || l.state == "failed") return {};
  const std::lock_guard lock(mutex_);
  held_[folder] = l;
  return folder;
}

bool Leases::holds(const fs::path& folder) {
  const std::lock_guard lock(mutex_);
  return update(folder, "running");
}

bool Leases::is_held(const fs::path& folder) {
  const std::lock_guard lock(mutex_);
  return held_.contains(folder);
}

void Leases::release(const fs::path& folder) {
  const std::lock_guard lock(mutex_);
  update(folder, "released");
}

int64_t Leases::crashed(const fs::path& folder, const std::string& why) {
  const std::lock_guard lock(mutex_);
  const auto at = held_.find(folder);
  if (at == held_.end()) return 0;
  at->second.why = why.substr(0, 300);
  const int64_t crashes = ++at->second.crashes;
  update(folder, "failed");
  return crashes;
}

// What processes that lost the folder had not finished writing: it may be locked, if they live.
static void remove_parts(const fs::path& folder) {
  std::error_code ignored;
  std::vector<fs::path> parts;
  for (fs::directory_iterator it(folder, ignored), end; !ignored && it != end;
       it.increment(ignored))
    if (it->path().filename().string().find(".part") != std::string::npos)
      parts.push_back(it->path());
  for (const fs::path& part : parts) fs::remove_all(part, ignored);
}

bool Leases::publish(const fs::path& folder, const fs::path& target) {
  {
    const std::lock_guard lock(mutex_);
    if (!update(folder, "running")) return false;
    remove_parts(folder);
    // The answer to a rename may be lost on its way from a server, and the second one be an error.
    const bool renamed = ::rename(folder.c_str(), target.c_str()) == 0;
    if (!renamed && read_lease(contents(target / ".lease")).token != held_[folder].token)
      return false;
    held_.erase(folder);
  }
  std::error_code ignored;
  fs::remove(target / ".lease", ignored);
  files::sync_folder(target.parent_path());
  for (const int64_t number : tries(target)) fs::remove_all(try_folder(target, number), ignored);
  return true;
}

}  // namespace horner::study

#include "files/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <sstream>
#include <thread>

#include "core/check.h"

namespace horner::files {

namespace fs = std::filesystem;

static constexpr const char* kLock = ".lock";

static std::string myself() {
  char host[256] = "", when[64] = "";
  ::gethostname(host, sizeof host - 1);
  const std::time_t now = std::time(nullptr);
  std::strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S UTC", std::gmtime(&now));
  return "process " + std::to_string(::getpid()) + " on " + host + " since " + when;
}

// What the owner wrote. It writes right after taking the lock: an empty file is filled soon.
static std::string owner_in(const fs::path& path) {
  std::string line;
  for (int i = 0; i < 50 && line.empty(); ++i) {
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::ifstream in(path);
    std::getline(in, line);
  }
  return line.empty() ? "another process" : line;
}

static bool same_file(int file, const fs::path& path) {
  struct stat here, there;
  return ::fstat(file, &here) == 0 && ::stat(path.c_str(), &there) == 0 &&
         here.st_ino == there.st_ino && here.st_dev == there.st_dev;
}

bool has_local_locks(std::string_view mountinfo, unsigned major, unsigned minor) {
  std::istringstream lines{std::string(mountinfo)};
  const std::string device = std::to_string(major) + ":" + std::to_string(minor);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string id, parent, number, word, kind, source, options;
    words >> id >> parent >> number;
    if (number != device) continue;
    while (words >> word && word != "-") continue;
    words >> kind >> source >> options;
    options = "," + options + ",";
    const auto has = [&](const char* option) { return options.find(option) != options.npos; };
    return kind.starts_with("nfs") &&
           (has(",nolock,") || has(",local_lock=all,") || has(",local_lock=flock,"));
  }
  return false;
}

static bool has_local_locks(int file) {
  struct stat info;
  if (::fstat(file, &info) != 0) return false;
  std::ostringstream mounts;
  mounts << std::ifstream("/proc/self/mountinfo").rdbuf();
  return has_local_locks(mounts.str(), major(info.st_dev), minor(info.st_dev));
}

bool FolderLock::take() {
  std::error_code error;
  for (fs::path p = folder_; !p.empty() && !fs::exists(p, error); p = p.parent_path())
    made_.insert(made_.begin(), p);
  fs::create_directories(folder_, error);
  check(!error, "cannot create '", folder_.string(), "': ", error.message());
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0 && errno == ENOENT) return false;
  check(file_ >= 0, "cannot write '", path_.string(), "': ", std::strerror(errno));
  if (::flock(file_, LOCK_EX | LOCK_NB) == 0) return same_file(file_, path_);
  const int why = errno;
  if (why == EWOULDBLOCK) {
    ::close(file_);
    fail(folder_.string(), " is in use by ", owner_in(path_),
         "; wait until it ends, or choose another --out");
  }
  warning_ = std::string("does not support locks (") + std::strerror(why) + ")";
  return true;
}

FolderLock::FolderLock(const fs::path& folder)
    : folder_(folder.has_filename() ? folder : folder.parent_path()), path_(folder_ / kLock) {
  for (int tries = 0; !take() && tries < 100; ++tries)
    if (file_ >= 0) ::close(file_);
  check(file_ >= 0, "cannot write '", path_.string(), "': the folder was removed meanwhile");
  if (warning_.empty() && has_local_locks(file_)) warning_ = "keeps locks on this machine only";
  if (!warning_.empty())
    warning_ = "the file system of " + folder_.string() + " " + warning_ +
               ": make sure that no other process uses this folder";
  const std::string text = myself() + "\n";
  const bool written = ::ftruncate(file_, 0) == 0 &&
                       ::pwrite(file_, text.data(), text.size(), 0) == ssize_t(text.size());
  if (!written) warning_ += warning_.empty() ? "cannot write " + path_.string() : "";
}

FolderLock::~FolderLock() {
  ::unlink(path_.c_str());  // while it is locked: whoever waits for it sees that it is gone
  ::close(file_);
  for (auto p = made_.rbegin(); p != made_.rend(); ++p)
    if (::rmdir(p->c_str()) != 0) break;
}

std::string owner_of(const fs::path& folder) {
  const fs::path path = folder / kLock;
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return "";
  const bool held = ::flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(file);
  return held ? owner_in(path) : "";
}

}  // namespace horner::files

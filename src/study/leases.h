// Processes on one machine or on many share the runs of a study through its folder alone.
//   R.try<n>  a run in the hands of one process, whose .lease is in it
//   R         a finished run
// A process takes a run by making R.try1, or by renaming R.try<n> to R.try<n+1> once its holder has
// given it up, is dead or silent. It finishes the run by renaming R.try<n> to R. Each of these
// succeeds for one process only, on NFS too, and whoever lost its folder finds the path gone.
// Clocks are never compared: a holder is silent if the counter in its .lease has not changed for as
// long as it promised, by the observer's own steady clock.
#pragma once

#include <condition_variable>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

namespace horner::study {

inline constexpr int64_t kMostCrashes = 3;  // of a run, in a row: it has failed
inline constexpr int64_t kMostLost = 10;    // holders that vanished, without a new checkpoint

// The contents of a .lease.
struct Lease {
  std::string host, job;  // job: of Slurm, or ""
  std::string machine;    // this boot of the kernel and the namespace of `pid`
  int64_t pid = 0, started = 0;
  std::string token;  // of this holder, random
  std::string state;  // running, released, failed
  double seconds = 60;
  int64_t beat = 0;
  int64_t crashes = 0, lost = 0, from = 0;  // from: step of the newest checkpoint when taken
  std::string settings, why;                // of the run; of the last crash
  int64_t number = 0;                       // of the try that it is about
};

enum class Standing { free, held, failed };
struct Seen {
  Standing standing = Standing::free;
  int64_t number = 0;            // of the newest try; 0: there is none
  bool target = false;           // whether R was there, after that was seen
  bool alive = false;            // a heartbeat of its holder was seen
  std::filesystem::path folder;  // of the newest try
  Lease lease = {};
};

// The newest R.try<n> of R, and what its .lease says. standing: held unless that says otherwise.
Seen newest_try(const std::filesystem::path& target);

// Seconds since the holder's last heartbeat, as the file system's clock tells: to show, not to
// decide by. Negative if unknown.
double heartbeat_age(const std::filesystem::path& folder);

// The leases of this process, with a thread for their heartbeats.
class Leases {
 public:
  // seconds: after this time without a heartbeat others may take its runs; retry: also take runs
  // that have failed, once each.
  explicit Leases(double seconds, bool retry = false);
  ~Leases();  // gives up what is left

  // Must be called repeatedly to notice a silent holder. `settings`: crashes of a run with other
  // settings do not count; "": none does.
  Seen look(const std::filesystem::path& target, const std::string& settings = "");

  // The folder to work in, or nothing if another process has the run. Of a run without a try it
  // takes R itself, if it was seen: the caller knows that it is not finished.
  std::optional<std::filesystem::path> take(const std::filesystem::path& target, const Seen&,
                                            const std::string& settings = "");

  bool holds(const std::filesystem::path& folder);    // false: another process has taken it over
  bool is_held(const std::filesystem::path& folder);  // the same, as the last heartbeat found it
  void release(const std::filesystem::path& folder);
  int64_t crashed(const std::filesystem::path& folder, const std::string& why);  // how often

  // Renames the folder to `target` and removes older tries. False if another process was first.
  bool publish(const std::filesystem::path& folder, const std::filesystem::path& target);

  double poll_seconds() const { return seconds_ / 12; }  // between two looks or heartbeats

 private:
  struct Watched {
    std::string text;
    double quiet;  // seconds
    bool alive;    // a heartbeat was seen
    std::chrono::steady_clock::time_point last;
  };
  bool is_silent(const std::filesystem::path& folder, const std::string& text, double limit);
  bool update(const std::filesystem::path& folder, const std::string& state);
  void keep_beating(const std::stop_token&);
  bool move(const Seen&, const std::filesystem::path& target, const std::filesystem::path& folder);

  const double seconds_;
  const bool retry_;
  std::set<std::filesystem::path> retried_;
  std::map<std::filesystem::path, Watched> watched_;
  std::mutex mutex_;  // of what follows
  std::map<std::filesystem::path, Lease> held_;
  std::condition_variable_any wake_;
  std::jthread heart_;
};

}  // namespace horner::study

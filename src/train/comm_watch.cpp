#include "train/comm_watch.h"

#include <atomic>
#include <csignal>
#include <exception>

namespace horner::train {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kBeat{250};
constexpr milliseconds kMissed{1500};  // silence that proves a death after a failed collective
constexpr seconds kGrace{5};           // for a collective to fail by itself, which is cleaner
constexpr seconds kUnwinding{10};
constexpr const char* kResume = "; stopping; resume with --resume";

static std::atomic<bool> terminating = false;

std::string beat_key(int rank) {
  return "beat/" + std::to_string(rank);
}

Watch::Watch(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks, const Joining& j, bool host,
             std::string lost_store)
    : store_(std::move(store)),
      ranks_(ranks),
      silence_(j.silence),
      lost_(j.lost),
      host_(host),
      lost_store_(std::move(lost_store)),
      exceptions_(std::uncaught_exceptions()),
      peers_(ranks.world, {"", Clock::now()}) {
  for (int r = 0; r < ranks_.world; ++r) keys_.push_back(beat_key(r));
  // When a rank dies torchrun sends SIGTERM to the others, mostly before a collective has failed:
  // handle it, to report which rank died.
  struct sigaction now;
  if (lost_ && sigaction(SIGTERM, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) {
    terminating = false;
    handles_term_ = std::signal(SIGTERM, [](int) { terminating = true; }) != SIG_ERR;
  }
  thread_ = std::thread([this] { run(); });
}

bool Watch::terminated() {
  std::lock_guard held(mutex_);
  ends_itself_ = true;
  return handles_term_ && terminating;
}

bool Watch::leave() {
  const bool failed = std::uncaught_exceptions() > exceptions_;
  std::lock_guard held(mutex_);
  if (!note_.empty()) return note_ != "finished";
  if (failed && !blamed_) blamed_ = Clock::now();
  if (reason_.empty())
    reason_ = "rank " + std::to_string(ranks_.rank) + " failed with an error" + kResume;
  note_ = blamed_ ? "failed " + reason_ : "finished";
  wake_.notify_all();
  return bool(blamed_);
}

Watch::~Watch() {
  leave();
  std::unique_lock lock(mutex_);
  // The store ends with this process: first the others must read the note and write theirs.
  if (host_)
    while (!all_left()) wake_.wait_for(lock, kBeat);
  stop_ = true;
  lock.unlock();
  wake_.notify_all();
  thread_.join();
  say(note_);
  if (handles_term_) std::signal(SIGTERM, SIG_DFL);
}

void Watch::run() {
  std::unique_lock lock(mutex_);
  bool told = false;
  while (!stop_) {
    lock.unlock();
    try {
      if (!store_lost_) beat();
    } catch (const std::exception&) {
      std::lock_guard held(mutex_);
      store_lost_ = Clock::now();
    }
    lock.lock();
    wake_.notify_all();
    if (const std::string reason = judge(); !reason.empty() && !told) {
      told = true;
      reason_ = reason;
      note_ = "failed " + reason;
      lock.unlock();
      say("failed " + reason);
      if (lost_) lost_(reason);
      lock.lock();
    }
    const bool left = !note_.empty();
    wake_.wait_for(lock, kBeat, [&] { return stop_ || left != !note_.empty(); });
  }
}

void Watch::say(const std::string& note) {
  try {
    store_->set(keys_[ranks_.rank], note);
  } catch (const std::exception&) {  // the store is gone
  }
}

void Watch::beat() {
  std::string mine;
  {
    std::lock_guard held(mutex_);
    mine = note_.empty() ? std::to_string(++number_) : note_;
  }
  store_->set(keys_[ranks_.rank], mine);
  const auto read = store_->multiGet(keys_);
  std::lock_guard held(mutex_);
  // If this rank was suspended, that time does not count as silence of the others.
  const auto now = Clock::now(), away = last_ + 4 * kBeat;
  if (now > away)
    for (Peer& p : peers_) p.since += now - away;
  last_ = now;
  for (size_t r = 0; r < read.size(); ++r) {
    std::string says(read[r].begin(), read[r].end());
    if (says != peers_[r].says) peers_[r] = {std::move(says), now};
  }
}

std::string Watch::verdict(Clock::duration failed_for, Clock::duration silent_for) const {
  const auto now = Clock::now();
  if (store_lost_ && now - *store_lost_ >= failed_for) return lost_store_ + kResume;
  int silent = -1;
  for (int r = 0; r < ranks_.world; ++r) {
    const Peer& p = peers_[r];
    if (r == ranks_.rank || p.says == "finished") continue;
    if (p.says.starts_with("failed ")) {
      if (now - p.since >= failed_for) return p.says.substr(7);
    } else if (silent < 0 || p.since < peers_[silent].since) {
      silent = r;
    }
  }
  if (silent < 0 || now - peers_[silent].since < silent_for) return "";
  const auto since = std::chrono::duration_cast<seconds>(now - peers_[silent].since).count();
  return "lost rank " + std::to_string(silent) + ": no heartbeat for " + std::to_string(since) +
         " s" + kResume;
}

std::string Watch::judge() {
  // The exception has been thrown, but its unwinding may wait for the dead rank.
  if (blamed_) return Clock::now() - *blamed_ < kUnwinding ? "" : reason_;
  if (!note_.empty()) return "";
  if (handles_term_ && terminating) {
    const auto now = Clock::now();
    if (!terminated_) terminated_ = now;
    // A launcher may forward a signal that the ranks also received; a later one ends the process.
    if (now - *terminated_ > kMissed) std::signal(SIGTERM, SIG_DFL);
    if (ends_itself_) return verdict(kGrace, silence_);
    const std::string cause = verdict({}, kMissed);
    if (!cause.empty() || now - *terminated_ < 2 * kMissed) return cause;
    return "rank " + std::to_string(ranks_.rank) + " received SIGTERM; resume with --resume";
  }
  return verdict(kGrace, silence_);
}

bool Watch::all_left() const {
  if (store_lost_) return true;
  for (int r = 0; r < ranks_.world; ++r)
    if (const Peer& p = peers_[r]; r != ranks_.rank && p.says != "finished" &&
                                   !p.says.starts_with("failed ") &&
                                   Clock::now() - p.since < kGrace)
      return false;
  return true;
}

std::string Watch::blame(const std::string& error) {
  std::unique_lock lock(mutex_);
  blamed_ = Clock::now();
  const auto until = Clock::now() + 2 * kMissed;
  std::string cause;
  while ((cause = verdict({}, kMissed)).empty() && Clock::now() < until)
    wake_.wait_for(lock, kBeat);
  if (cause.empty())
    for (int r = 0; r < ranks_.world; ++r)
      if (r != ranks_.rank && peers_[r].says == "finished")
        cause = "rank " + std::to_string(r) + " finished before this rank (" + error + ")";
  reason_ = cause;
  return cause;
}

}  // namespace horner::train

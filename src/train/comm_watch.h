// Detects dead ranks: every rank increments its heartbeat in the store four times a second and
// reads those of the others. A rank that leaves writes its reason instead.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "train/comm.h"

namespace horner::train {

class Watch {
 public:
  // `store` is a separate connection, so that heartbeats do not wait behind other calls. `host`:
  // the store is in this process. `lost_store`: the message if the store does not answer.
  Watch(c10::intrusive_ptr<c10d::Store> store, const Ranks&, const Joining&, bool host,
        std::string lost_store);
  ~Watch();

  // Writes that this rank finished, or why it failed. Returns whether it failed.
  bool leave();

  // Whether SIGTERM came, if it is handled here. A caller that asks ends by itself then, together
  // with the other ranks; otherwise the process is ended.
  bool terminated();

  // After a collective failed with `error`: the reason if another rank is the cause, else "". Waits
  // a few seconds for the evidence.
  std::string blame(const std::string& error);

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    std::string says;  // a number, "finished" or "failed REASON"
    Clock::time_point since;
  };

  void run();
  void beat();
  std::string verdict(Clock::duration failed_for, Clock::duration silent_for) const;
  std::string judge();  // the thread's verdict; empty: all is well
  bool all_left() const;
  void say(const std::string& note);

  c10::intrusive_ptr<c10d::Store> store_;
  const Ranks ranks_;
  const std::chrono::seconds silence_;
  const std::function<void(const std::string&)> lost_;
  const bool host_;
  const std::string lost_store_;
  const int exceptions_;
  std::vector<std::string> keys_;

  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable wake_;
  std::vector<Peer> peers_;
  Clock::time_point last_ = Clock::now();  // the last beat
  std::string note_, reason_;  // written instead of the heartbeat; the reason that was found
  std::optional<Clock::time_point> store_lost_, terminated_, blamed_;
  bool stop_ = false, handles_term_ = false, ends_itself_ = false;
  int64_t number_ = 0;
  std::thread thread_;
};

// The key of a rank's heartbeat. It exists once the rank has joined.
std::string beat_key(int rank);

}  // namespace horner::train

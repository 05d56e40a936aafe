// What a Group holds where there is more than one process, for the files comm*.cpp alone.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "train/comm.h"
#include "train/comm_watch.h"

namespace horner::train {

struct Link {
  std::string backend;
  c10::intrusive_ptr<c10d::Store> store;
  std::unique_ptr<Watch> watch;
  c10::intrusive_ptr<c10d::ProcessGroup> group;

  // After a failure the group is left as it is, for the end of the process: one of Gloo's threads
  // may wait for the dead rank until the timeout, and the group's destructor for the thread.
  ~Link() {
    if (watch && watch->leave()) group.release();
  }
};

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Store = c10::intrusive_ptr<c10d::Store>;

Backend gloo_backend(const Store&, const Ranks&, std::chrono::milliseconds timeout);
Backend nccl_backend(const Store&, const Ranks&, std::chrono::milliseconds timeout);
const char* why_no_nccl();  // null where it is built in

// Runs `exchange`; what it throws becomes an Error that says who is gone, where somebody is.
void exchange(const Link&, const char* what, const std::function<void()>& exchange);

}  // namespace horner::train

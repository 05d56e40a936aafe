// What a Group of more than one process holds; private to comm*.cpp.
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
  // For a few numbers, which must not wait behind weights or gradients on their way: Gloo.
  c10::intrusive_ptr<c10d::Backend> control;
  std::vector<c10::intrusive_ptr<c10d::Backend>> others;  // between some of the ranks
  std::chrono::milliseconds timeout;                      // of one collective

  // After a failure the group is leaked: one of Gloo's threads may wait for the dead rank until the
  // timeout, and the group's destructor waits for the thread.
  ~Link() {
    if (!watch || !watch->leave()) return;
    group.release(), control.release();
    for (auto& other : others) other.release();
  }
};

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Store = c10::intrusive_ptr<c10d::Store>;

Backend gloo_backend(const Store&, const Ranks&, std::chrono::milliseconds timeout);
Backend nccl_backend(const Store&, const Ranks&, std::chrono::milliseconds timeout);
const char* why_no_nccl();  // null if it is built in

// Runs `exchange`; an exception becomes an Error that names the dead rank, if there is one.
void exchange(const Link&, const char* what, const std::function<void()>& exchange);

}  // namespace horner::train

// Several processes, one model: who this process is, what the processes tell one another, and
// gradients averaged over all of them while backward still runs. One process: nothing to do.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace horner::train {

struct Ranks {
  int rank = 0, world = 1;
  int local_rank = 0, local_world = 1;  // on this machine
};

// RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun sets them; without WORLD_SIZE there
// is one process.
Ranks ranks_from_environment();

struct Joining {
  at::Device device = at::kCPU;  // where this rank's tensors are
  // For tensors on a GPU: "nccl", "gloo", or "auto": NCCL where it was built in and every rank of
  // this machine has a GPU of its own, else Gloo. Tensors on a CPU always go by Gloo.
  std::string backend = "auto";
  std::chrono::seconds join{120};     // the longest wait for all ranks to come
  std::chrono::seconds timeout{600};  // the longest wait within one exchange
  std::chrono::seconds silence{15};   // a rank that is not heard of for so long is gone
  // Called with the reason, from a thread of the group's, when a rank is gone and this one may be
  // waiting for it in vain, or when the launcher ends the run (SIGTERM, unless that is handled
  // already): print it and end the process. Without it only the next exchange that fails tells.
  std::function<void(const std::string& reason)> lost;
};

struct Link;

// The processes of a run. Every rank makes the same calls in the same order. Where another rank is
// gone, a call throws an Error that names it.
class Group {
 public:
  Group();  // one process
  // Joins the others at MASTER_ADDR:MASTER_PORT.
  explicit Group(const Ranks&, const Joining& = {});
  ~Group();  // tells the others how it ended: by an exception or not
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;

  const Ranks& ranks() const { return ranks_; }
  std::string backend() const;  // "none", "gloo" or "nccl"

  void broadcast(const std::vector<at::Tensor>&) const;  // of rank 0, over what the others have
  void sum(const at::Tensor&) const;                     // over ranks, in place
  void barrier() const;

  Link* link() const { return link_.get(); }  // null where there is one process

 private:
  Ranks ranks_;
  std::unique_ptr<Link> link_;
};

// Gradients averaged over ranks. A parameter that no rank's loss depends on keeps what gradient it
// has, or none. Gradients may be zeroed or dropped between steps; they must not outlive this.
class GradientAverage {
 public:
  // The same parameters, in the same order, on every rank: in the order of the forward pass, so
  // that the last ones are sent first.
  GradientAverage(const Group&, const std::vector<at::Tensor>& parameters);
  ~GradientAverage();
  GradientAverage(GradientAverage&&) noexcept;
  GradientAverage& operator=(GradientAverage&&) noexcept;

  // loss.backward(). Gradients add up over calls; with `last`, the one that ends a step, their sum
  // is averaged over ranks.
  void backward(const at::Tensor& loss, bool last = true);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace horner::train

// Data-parallel training: ranks, collectives, and gradients that are averaged while backward runs.
// With one process every call does nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace horner::train {

inline constexpr int kMostRanks = 1 << 20;

struct Ranks {
  int rank = 0, world = 1;
  int local_rank = 0, local_world = 1;  // on this machine
};

// Reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets; without WORLD_SIZE
// there is one process.
Ranks ranks_from_environment();

struct Joining {
  at::Device device = at::kCPU;  // where this rank's tensors are
  // For tensors on a GPU: "nccl", "gloo", or "auto": NCCL if it was built in and every rank of this
  // machine has its own GPU, otherwise Gloo. Tensors on a CPU always use Gloo.
  std::string backend = "auto";
  std::chrono::seconds join{120};     // timeout for all ranks to join
  std::chrono::seconds timeout{600};  // timeout of one collective
  std::chrono::seconds silence{15};   // a rank without a heartbeat for this long is considered dead
  // Called with the reason from another thread when a rank is dead and this one may be waiting for
  // it, or when the launcher ends the run (SIGTERM, unless it is handled already). It should print
  // the reason and end the process. Without it only the next collective reports the failure.
  std::function<void(const std::string& reason)> lost;
};

// Bytes that this process has sent through the TCP connections that it has now; 0 if the system
// does not count them.
int64_t bytes_sent();

struct Link;

// The processes of a run. Every rank makes the same calls in the same order. A call throws an Error
// that names the dead rank if there is one.
class Group {
 public:
  Group();  // one process
  // Joins the other ranks at MASTER_ADDR:MASTER_PORT.
  explicit Group(const Ranks&, const Joining& = {});
  ~Group();  // tells the other ranks whether this one failed
  Group(Group&&) noexcept;
  Group& operator=(Group&&) noexcept;

  const Ranks& ranks() const { return ranks_; }
  std::string backend() const;  // "none", "gloo" or "nccl"

  void broadcast(const std::vector<at::Tensor>&) const;  // from rank 0, in place
  void sum(const at::Tensor&) const;                     // over ranks, in place
  void barrier() const;

  // Whether this rank received SIGTERM. A caller that asks, on every rank, ends the run by itself;
  // `lost` is then called only if a rank is dead.
  bool terminated() const;

  Link* link() const { return link_.get(); }  // null if there is one process

 private:
  Ranks ranks_;
  std::unique_ptr<Link> link_;
};

// Gradients averaged over ranks. A parameter that no rank's loss depends on keeps its gradient, or
// stays without one. Gradients may be zeroed or dropped between steps; they must not outlive this.
class GradientAverage {
 public:
  // Every rank passes the same parameters in the order of the forward pass, so that the last ones
  // are sent first.
  GradientAverage(const Group&, const std::vector<at::Tensor>& parameters);
  ~GradientAverage();
  GradientAverage(GradientAverage&&) noexcept;
  GradientAverage& operator=(GradientAverage&&) noexcept;

  // loss.backward(). Gradients accumulate; the `last` call of a step averages them over ranks.
  void backward(const at::Tensor& loss, bool last = true);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace horner::train

// Joining the other ranks, and collectives.
#include "train/comm.h"

#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <charconv>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "core/check.h"
#include "train/comm_link.h"

namespace horner::train {

using std::chrono::milliseconds;

static int number(const char* name, int missing, int least, int most) {
  const char* text = std::getenv(name);
  if (!text || !*text) return missing;
  int n = 0;
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, n);
  check(error == std::errc() && at == end && n >= least && n <= most, name, "=", text,
        ": must be an integer from ", least, " to ", most, " (torchrun sets it)");
  return n;
}

static const char* needed(const char* name) {
  const char* text = std::getenv(name);
  check(text && *text, "WORLD_SIZE is set but ", name, " is not (torchrun sets both)");
  return text;
}

Ranks ranks_from_environment() {
  Ranks r;
  r.world = number("WORLD_SIZE", 1, 1, kMostRanks);
  if (r.world > 1) needed("RANK");
  r.rank = number("RANK", 0, 0, r.world - 1);
  r.local_world = number("LOCAL_WORLD_SIZE", r.world, 1, r.world);
  r.local_rank = number("LOCAL_RANK", r.rank % r.local_world, 0, r.local_world - 1);
  return r;
}

// The first line of the message, without torch's stack trace.
static std::string brief(const std::exception& e) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&e);
  const std::string text = torch_error ? torch_error->what_without_backtrace() : e.what();
  return text.substr(0, text.find('\n'));
}

void exchange(const Link& link, const char* what, const std::function<void()>& exchange) {
  try {
    exchange();
  } catch (const std::exception& e) {
    const std::string error = brief(e);
    const std::string cause = link.watch->blame(error);
    if (cause.empty() && dynamic_cast<const Error*>(&e)) throw;
    fail(cause.empty() ? std::string(what) + " failed: " + error : cause);
  }
}

namespace {

struct Meeting {
  std::string host;
  int port;
  bool served;  // torchrun hosts the store, and every rank is a client
  std::string run;
};

Meeting meeting_from_environment() {
  Meeting m{.host = needed("MASTER_ADDR")};
  needed("MASTER_PORT");
  m.port = number("MASTER_PORT", 0, 1, 65535);
  const char* agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  m.served = agent && std::strcmp(agent, "True") == 0;
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  m.run = std::string("horner/") + (restarts ? restarts : "0");
  return m;
}

Store connect(const Meeting& m, const Ranks& r, bool server, milliseconds timeout) {
  c10d::TCPStoreOptions o;
  o.port = uint16_t(m.port);
  o.isServer = server;
  o.waitWorkers = false;
  o.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::PrefixStore>(m.run,
                                                  c10::make_intrusive<c10d::TCPStore>(m.host, o));
  } catch (const std::exception& e) {
    fail("rank ", r.rank, " cannot ", server ? "open" : "reach", " the store at ", m.host, ":",
         m.port, " (MASTER_ADDR, MASTER_PORT): ", brief(e));
  }
}

void meet(const Store& store, const Ranks& r, const Joining& j) {
  store->set(beat_key(r.rank), "0");
  std::vector<std::string> keys;
  for (int i = 0; i < r.world; ++i) keys.push_back(beat_key(i));
  try {
    store->wait(keys, j.join);
  } catch (const std::exception&) {
    std::string missing;
    for (int i = 0; i < r.world; ++i)
      if (!store->check({keys[i]})) missing += (missing.empty() ? "" : ", ") + std::to_string(i);
    fail("timed out after ", j.join.count(), " s waiting for ranks ", missing, " (of ", r.world,
         ")");
  }
}

std::string chosen_backend(const Ranks& r, const Joining& j) {
  if (j.backend == "gloo") return "gloo";
  const int gpus = int(at::getNumGPUs());
  std::string why_not;
  if (!j.device.is_cuda()) {
    why_not = "it requires tensors on a GPU, and the model is on the CPU";
  } else if (why_no_nccl()) {
    why_not = why_no_nccl();
  } else if (r.local_world > gpus) {
    why_not = "it requires one GPU per rank, and this machine has " + std::to_string(gpus) +
              " for " + std::to_string(r.local_world) + " ranks";
  }
  check(j.backend == "auto" || why_not.empty(), "cannot use NCCL: ", why_not,
        "; use 'auto' or 'gloo'");
  return why_not.empty() ? "nccl" : "gloo";
}

void agree(const Store& store, const Ranks& r, const std::string& backend) {
  if (r.rank == 0) store->set("backend", backend);
  const auto bytes = store->get("backend");
  const std::string first(bytes.begin(), bytes.end());
  check(first == backend, "rank 0 uses ", first, ", but rank ", r.rank, " uses ", backend,
        "; give --backend gloo to all ranks");
}

}  // namespace

int64_t bytes_sent() {
  int64_t sum = 0;
  constexpr int kMost = 4096;  // descriptors
  for (int fd = 0; fd < kMost; ++fd) {
    struct tcp_info info = {};
    socklen_t size = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
        size >= offsetof(struct tcp_info, tcpi_bytes_retrans))
      sum += int64_t(info.tcpi_bytes_sent);
  }
  return sum;
}

Group::Group() = default;
Group::Group(Group&&) noexcept = default;
Group& Group::operator=(Group&&) noexcept = default;
Group::~Group() = default;

Group::Group(const Ranks& ranks, const Joining& j) : ranks_(ranks) {
  if (ranks.world == 1) return;
  // Gloo may write to a connection that a dead rank has closed: report an error, do not die.
  std::signal(SIGPIPE, SIG_IGN);
  auto link = std::make_unique<Link>();
  const Meeting m = meeting_from_environment();
  const bool host = ranks.rank == 0 && !m.served;
  link->backend = chosen_backend(ranks, j);
  link->store = connect(m, ranks, host, j.join);
  meet(link->store, ranks, j);
  agree(link->store, ranks, link->backend);

  using Type = c10d::ProcessGroup::BackendType;
  const bool nccl = link->backend == "nccl";
  const Store gloo_store = c10::make_intrusive<c10d::PrefixStore>("gloo", link->store);
  const Backend gloo = gloo_backend(gloo_store, ranks, j.timeout);
  link->group = c10::make_intrusive<c10d::ProcessGroup>(link->store, ranks.rank, ranks.world);
  link->group->setDefaultBackend(nccl ? Type::NCCL : Type::GLOO);
  link->group->setBackend(at::kCPU, Type::GLOO, gloo);
  if (nccl) {
    const Store nccl_store = c10::make_intrusive<c10d::PrefixStore>("nccl", link->store);
    link->group->setBackend(at::kCUDA, Type::NCCL, nccl_backend(nccl_store, ranks, j.timeout));
  } else {
    link->group->setBackend(at::kCUDA, Type::GLOO, gloo);
  }
  const Store control_store = c10::make_intrusive<c10d::PrefixStore>("control", link->store);
  link->timeout = j.timeout;
  link->control = gloo_backend(control_store, ranks, j.timeout);
  const std::string place = m.host + ":" + std::to_string(m.port);
  const std::string lost_store = m.served ? "lost the launcher, which hosts the store at " + place
                                          : "lost rank 0, which hosts the store at " + place;
  link->watch =
      std::make_unique<Watch>(connect(m, ranks, false, j.join), ranks, j, host, lost_store);
  link_ = std::move(link);
}

std::string Group::backend() const {
  return link_ ? link_->backend : "none";
}

void Group::broadcast(const std::vector<at::Tensor>& tensors) const {
  if (!link_) return;
  const c10::NoGradGuard without_gradients;
  std::vector<at::Tensor> plain;
  for (const at::Tensor& t : tensors) plain.push_back(t.detach());
  constexpr size_t kBuffer = 25 << 20;
  exchange(*link_, "the broadcast",
           [&] { c10d::broadcast_coalesced(link_->group, plain, kBuffer, 0); });
}

void Group::sum(const at::Tensor& x) const {
  if (!link_) return;
  check(x.is_contiguous(), "a sum over ranks requires a contiguous tensor, not strides ",
        x.strides());
  std::vector<at::Tensor> one{x.detach()};
  exchange(*link_, "the sum over ranks", [&] {
    (x.is_cpu() ? link_->control->allreduce(one) : link_->group->allreduce(one))->wait();
  });
}

void Group::barrier() const {
  if (!link_) return;
  exchange(*link_, "the barrier", [&] { link_->control->barrier()->wait(); });
}

bool Group::terminated() const {
  return link_ && link_->watch->terminated();
}

}  // namespace horner::train

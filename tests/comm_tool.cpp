// One rank, for comm_test.py:
//   comm_tool train OUT WITH ACCUMULATE STEPS    SGD on a `tiny` model, each rank on its rows of a
//                                                batch; writes loss, gradients and weights to OUT.
//                                                SHARD=optimizer|gradients, CONTEXT=ranks that
//                                                share a row, RECOMPUTE=1
//   comm_tool unused OUT                         parameters that only one rank uses, or none
//   comm_tool talk OUT                           broadcast and sum
//   comm_tool differ                             parameters whose sizes differ between ranks
//   comm_tool die WHERE RANK                     steps until RANK kills itself in "forward" or
//                                                "backward", "stop"s, or "throw"s
//   comm_tool events FOLDER FIRST                lines "STEP TIME VALUE TAG.." to an event file
//   comm_tool go FOLDER                          steps forever; its process id is in FOLDER/<rank>
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iostream>

#include "core/check.h"
#include "files/tensors_file.h"
#include "nn/slots.h"
#include "train/comm.h"
#include "train/context.h"
#include "train/events.h"
#include "train/settings.h"
#include "train/shards.h"

using namespace horner;

using Words = std::vector<std::string>;

static train::Group join() {
  const train::Ranks r = train::ranks_from_environment();
  train::Joining j;
  j.silence = std::chrono::seconds(8);
  j.join = std::chrono::seconds(std::getenv("JOIN") ? std::atoi(std::getenv("JOIN")) : 60);
  j.lost = [](const std::string& reason) {
    std::cerr << reason << std::endl;
    std::_Exit(3);
  };
  if (const char* backend = std::getenv("BACKEND")) j.backend = backend;
  train::check_settings({.backend = j.backend});
  return train::Group(r, j);
}

static std::vector<at::Tensor> parameters(nn::Model& m, at::ScalarType type) {
  std::vector<at::Tensor> out;
  for (const nn::Slot& s : nn::slots(m)) {
    *s.at = s.at->detach().to(type).clone().requires_grad_(true);
    out.push_back(*s.at);
  }
  return out;
}

static void drop_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& p : parameters) p.mutable_grad() = at::Tensor();
}

// 12 rows of tokens; this rank has every world-th row, of 33 tokens or of LENGTH + 1.
static at::Tensor rows(const train::Ranks& r, int64_t step, int64_t V) {
  const at::Generator g = at::detail::createCPUGenerator(100 + step);
  const char* length = std::getenv("LENGTH");
  return at::randint(V, {12, 1 + (length ? std::atoll(length) : 32)}, g, at::kLong)
      .slice(0, r.rank, std::nullopt, r.world);
}

static at::Tensor loss_of(const nn::Model& m, const at::Tensor& tokens, const nn::Run& run = {}) {
  const int64_t parts = run.split ? run.split->ranks : 1, n = (tokens.size(1) - 1) / parts;
  const int64_t from = run.split ? run.split->rank * n : 0;
  const at::Tensor x = nn::hidden(m, tokens.narrow(1, from, n), run);
  return nn::cross_entropy(m, x.reshape({-1, x.size(-1)}),
                           tokens.narrow(1, from + 1, n).reshape({-1}));
}

// Gradients of a step, averaged or sharded, and the update with them.
struct Updates {
  std::unique_ptr<train::GradientAverage> average;
  std::unique_ptr<train::Shards> shards;
  std::vector<at::Tensor> parameters;

  Updates(const train::Group& group, const std::vector<at::Tensor>& p) : parameters(p) {
    const char* shard = std::getenv("SHARD");
    if (shard && group.link())
      shards = std::make_unique<train::Shards>(
          group, p,
          train::Sharding{.gradients = std::string(shard) == "gradients", .bucket = 65536});
    else
      average = std::make_unique<train::GradientAverage>(group, p);
  }
  void backward(const at::Tensor& loss, bool last) {
    shards ? shards->backward(loss, last) : average->backward(loss, last);
  }
  void apply(double rate) {
    const c10::NoGradGuard without_gradients;
    if (!shards)
      for (const at::Tensor& x : parameters)
        if (x.grad().defined()) x.add_(x.grad(), -rate);
    if (!shards) return;
    for (const train::Shards::Part& x : shards->parts()) x.weights.add_(x.gradient, -rate);
    shards->send_weights();
  }
};

static int train_model(const Words& a) {
  const train::Group group = join();
  const train::Ranks& r = group.ranks();
  const auto type = std::getenv("DOUBLE") ? at::kDouble : at::kFloat;
  // A different seed on each rank: only the broadcast makes the models equal.
  nn::Model m = nn::random_model(nn::preset("tiny", a[2]), 7 + r.rank);
  const std::vector<at::Tensor> p = parameters(m, type);
  group.broadcast(p);
  Updates updates(group, p);
  const char* given = std::getenv("CONTEXT");
  const train::Context context = train::context_of(r, given && r.world > 1 ? std::atoi(given) : 1);
  const attn::Split split = train::make_split(group, context);
  nn::Run run{.recompute = std::getenv("RECOMPUTE") != nullptr};
  if (context.parts > 1) run.split = &split;
  train::Ranks own = r;  // of those with other rows
  own.rank = context.group, own.world = context.groups;
  const int64_t parts = std::stoll(a[3]), steps = std::stoll(a[4]);
  files::TensorsFile out;
  std::vector<double> losses;
  for (int64_t step = 0; step < steps; ++step) {
    if (updates.shards) {
      updates.shards->wait_weights(p.size());
      updates.shards->clear();
    } else if (step % 2) {  // both ways to start a step
      drop_gradients(p);
    } else {
      for (const at::Tensor& x : p)
        if (x.grad().defined()) x.mutable_grad().zero_();
    }
    const std::vector<at::Tensor> micro = rows(own, step, m.config.V).chunk(parts);
    at::Tensor total = at::zeros({}, at::kDouble);
    for (size_t i = 0; i < micro.size(); ++i) {
      const at::Tensor loss = loss_of(m, micro[i], run) / double(micro.size());
      updates.backward(loss, i + 1 == micro.size());
      total += loss.detach();
    }
    group.sum(total);
    losses.push_back(total.item<double>() / r.world);
    updates.apply(0.1);
  }
  if (updates.shards) updates.shards->wait_weights(p.size());
  out.tensors["losses"] = at::tensor(losses, at::kDouble);
  for (const nn::Slot& s : nn::slots(m)) {
    out.tensors[s.name] = s.at->detach();
    if (s.at->grad().defined() && !updates.shards)
      out.tensors["grad." + s.name] = s.at->grad().clone();
  }
  // One file per rank: they must be equal.
  files::save_tensors(a[1] + std::to_string(r.rank), out);
  group.barrier();
  return 0;
}

// shared: used by all ranks; first: only by rank 0; none: unused.
static int unused(const Words& a) {
  const train::Group group = join();
  const train::Ranks& r = group.ranks();
  const auto make = [] { return at::ones({3}, at::kDouble).requires_grad_(true); };
  const at::Tensor shared = make(), first = make(), none = make();
  train::GradientAverage average(group, {shared, first, none});
  const auto half = [&] {
    const at::Tensor loss = (shared * (0.5 * (r.rank + 1))).sum();
    return r.rank == 0 ? loss + 3 * first.sum() : loss;
  };
  for (int step = 0; step < 3; ++step) {
    drop_gradients({shared, first, none});
    average.backward(half(), false);
    check(shared.grad().eq(0.5 * (r.rank + 1)).all().item<bool>(),
          "averaged before the last part of a step: ", shared.grad());
    average.backward(half());
  }
  check(!none.grad().defined(), "an unused parameter has a gradient");
  files::save_tensors(a[1] + std::to_string(r.rank),
                      {{{"shared", shared.grad().clone()}, {"first", first.grad().clone()}}});
  return 0;
}

static int talk(const Words& a) {
  const train::Group group = join();
  const int rank = group.ranks().rank;
  const at::Tensor x = at::full({5, 3}, double(rank + 1)), y = at::arange(4) + 10 * rank;
  const at::Tensor z = at::full({2}, rank + 0.5, at::kDouble), w = at::full({7}, double(rank));
  group.broadcast({x.t(), y, w.requires_grad_(true)});
  group.sum(z);
  group.barrier();
  files::save_tensors(a[1] + std::to_string(rank),
                      {{{"x", x}, {"y", y}, {"z", z}, {"w", w.detach()}}});
  std::cout << group.backend() << "\n";
  return 0;
}

static int differ() {
  const train::Group group = join();
  const at::Tensor p = at::ones({3 + group.ranks().rank}).requires_grad_(true);
  train::GradientAverage average(group, {p});
  average.backward(p.sum());
  return 0;
}

// Steps of a small model; calls `before` each step and `within` each backward pass.
static void steps(const train::Group& group, const std::function<void(int)>& before,
                  const std::function<void(int)>& within) {
  nn::Model m = nn::random_model(nn::preset("tiny"), 7);
  const std::vector<at::Tensor> p = parameters(m, at::kFloat);
  train::GradientAverage average(group, p);
  int step = 0;
  p[p.size() / 2].register_hook([&](const at::Tensor&) { within(step); });
  for (;; ++step) {
    before(step);
    drop_gradients(p);
    average.backward(loss_of(m, rows(group.ranks(), step, m.config.V)));
  }
}

static int die(const Words& a) {
  const train::Group group = join();
  const bool it = group.ranks().rank == std::stoi(a[2]);
  const auto now = [&, w = a[1]](const char* where, int step) {
    if (!it || step != 3) return;
    if (w == where) ::raise(SIGKILL);
    if (w == "stop") ::raise(SIGSTOP);
    if (w == "throw") fail("an error of rank ", group.ranks().rank);
  };
  steps(group, [&](int step) { now("forward", step); }, [&](int step) { now("backward", step); });
  return 0;
}

static int go(const Words& a) {
  const train::Group group = join();
  const std::string file = a[1] + "/" + std::to_string(group.ranks().rank);
  steps(
      group,
      [&](int step) {
        if (step == 2) std::ofstream(file) << ::getpid() << std::endl;
      },
      [](int) {});
  return 0;
}

// Lines with the same step and time form one record.
static int events(const Words& a) {
  train::EventFile file(a[1], std::stoll(a[2]));
  std::string step, time, value, tag, last;
  std::vector<train::Scalar> scalars;
  const auto put = [&](const std::string& at) {
    const size_t blank = at.find(' ');
    if (!scalars.empty())
      file.add(std::stoll(at.substr(0, blank)), scalars, std::stod(at.substr(blank)));
    scalars.clear();
  };
  while (std::cin >> step >> time >> value && std::getline(std::cin >> std::ws, tag)) {
    if (const std::string at = step + " " + time; at != last) put(last), last = at;
    scalars.push_back({tag, std::strtof(value.c_str(), nullptr)});
  }
  put(last);
  std::cout << file.path().string() << "\n";
  return 0;
}

int main(int argc, char** argv) {
  const Words a(argv + 1, argv + argc);
  try {
    if (a[0] == "train") return train_model(a);
    if (a[0] == "unused") return unused(a);
    if (a[0] == "talk") return talk(a);
    if (a[0] == "differ") return differ();
    if (a[0] == "die") return die(a);
    if (a[0] == "go") return go(a);
    if (a[0] == "events") return events(a);
  } catch (const Error& e) {
    std::cerr << e.what() << "\n";
  }
  return 2;
}

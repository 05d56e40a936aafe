// One rank, for scale_test.py:
//   scale_tool steps SETTINGS STEPS     steps of a run with these settings (JSON); prints what it
//                                       took and what train/scale.h says, as JSON
//   scale_tool reopen RUN OUT SETTINGS  opens the newest checkpoint of RUN and writes it to OUT
//   scale_tool attend 'VARIANT ..' TOKENS D PACKED [--device cuda] [--dtype bfloat16]
//                                       one sequence over all ranks; with ALONE=1 against this
//                                       process alone: outputs and gradients. PACKED: 1 for
//                                       sequences of uneven lengths. Prints errors, memory and
//                                       messages as JSON, a line for each variant
//   scale_tool differ                   rank 1 has another execution of a shared sequence
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <fstream>
#include <iostream>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include "attn/catalog.h"
#include "attn/inputs.h"
#include "core/check.h"
#include "core/machine.h"
#include "files/json.h"
#include "train/graph.h"
#include "train/scale.h"
#include "train/session.h"
#include "train/trace.h"

using namespace horner;
using train::Json;

// Counts the bytes of torch's tensors on the CPU.
struct Counting final : c10::Allocator {
  c10::Allocator* under = c10::GetCPUAllocator();
  inline static std::atomic<int64_t> now = 0, peak = 0;

  inline static std::mutex mutex;
  inline static std::unordered_map<void*, int64_t> sizes;  // of what is held

  static void drop(void* data) {
    {
      const std::lock_guard held(mutex);
      const auto found = sizes.find(data);
      if (found != sizes.end()) now -= found->second, sizes.erase(found);
    }
    c10::GetDefaultCPUAllocator()->raw_deallocate(data);
  }
  c10::DataPtr allocate(size_t n) override {
    void* const data = under->raw_allocate(n);
    const std::lock_guard held(mutex);
    if (data) sizes[data] = int64_t(n), now += int64_t(n);
    peak = std::max(peak.load(), now.load());
    return {data, data, drop, at::kCPU};
  }
  // Libraries take memory without a tensor, such as those of products in bfloat16.
  c10::DeleterFnPtr raw_deleter() const override { return drop; }
  void copy_data(void* to, const void* from, size_t n) const override {
    under->copy_data(to, from, n);
  }
};
static Counting counting;

static train::Group join(at::Device device = at::kCPU) {
  const train::Ranks r = train::ranks_from_environment();
  if (r.world == 1) return {};
  return train::Group(r, {.device = device, .lost = [](const std::string& reason) {
                            std::cerr << reason << std::endl;
                            std::_Exit(3);
                          }});
}

static train::Source tokens_of(int64_t V) {
  return {"random tokens", V,
          [V](train::Split, uint64_t index, std::span<int64_t> x, std::span<int64_t> y) {
            const at::Generator g = at::detail::createCPUGenerator(7 + index);
            const at::Tensor all = at::randint(V, {int64_t(x.size()) + 1}, g, at::kLong);
            std::copy_n(all.data_ptr<int64_t>(), x.size(), x.begin());
            std::copy_n(all.data_ptr<int64_t>() + 1, y.size(), y.begin());
          }};
}

static train::Layout layout_of(const train::Settings& s, const train::Session& t) {
  return {.processes = t.group.ranks().world,
          .context = t.context.parts,
          .sequences = t.tokens.size(1),
          .parts = t.tokens.size(0),
          .length = s.length,
          .shard = s.shard,
          .recompute = s.recompute,
          .bfloat16 = s.dtype == "bfloat16",
          .bucket = s.bucket * 1e6,
          .cpu = true};
}

static int steps(const std::string& settings, int64_t n) {
  train::Settings s;
  read_settings(s, Json::parse(settings), "settings");
  check_settings(s);
  c10::SetCPUAllocator(&counting, 255);
  const int64_t before = Counting::now;
  train::Session t = train::open_session({s, tokens_of(256), "", {}, join()});
  const auto step = [&] {
    start_step(t, step_batch(t, t.at.step), 1e30, 1e30);
    ++t.at.step;
  };
  const auto settle = [&] {
    if (t.shards) t.shards->wait_weights(t.optimizer.parameters.size());
    t.group.barrier();
  };
  step(), step();
  settle();
  Counting::peak = Counting::now.load();
  const int64_t sent = train::bytes_sent();
  for (int64_t i = 0; i < n; ++i) step();
  settle();
  const train::Layout layout = layout_of(s, t);
  const train::Memory m = memory_of(t.model.config, layout);
  std::cout << Json{{"peak", Counting::peak - before},
                    {"planned", m.all()},
                    {"weights", m.weights},
                    {"gradients", m.gradients},
                    {"optimizer", m.optimizer},
                    {"activations", m.activations},
                    {"loss_bytes", m.loss},
                    {"buffers", m.buffers},
                    {"sent", double(train::bytes_sent() - sent) / double(n)},
                    {"traffic", traffic_of(t.model.config, layout).all()},
                    {"loss", t.numbers.loss.item<float>()}}
                   .dump()
            << std::endl;
  train::write_trace(t.group.ranks().rank);
  t.group.barrier();
  return 0;
}

static int reopen(const std::string& run, const std::string& out, const std::string& settings) {
  train::Settings s;
  read_settings(s, Json::parse(settings), "settings");
  train::Group group = join();
  const auto newest = train::newest_checkpoint(run);
  const bool first = group.ranks().rank == 0;
  const train::Session t = train::open_session(
      {s, tokens_of(256), run, first ? newest : std::nullopt, std::move(group)});
  if (t.shards)
    save_checkpoint(out, t.model, t.optimizer, t.at, 1, t.group);
  else if (first)
    save_checkpoint(out, t.model, t.optimizer, t.at, 1);
  t.group.barrier();
  std::cout << "{}" << std::endl;
  return 0;
}

// Random inputs of all tokens, the same on every rank.
static attn::Inputs inputs_of(const attn::Spec& spec, int64_t T, int64_t D, bool packed,
                              const at::TensorOptions& options) {
  const at::Generator g = at::detail::createCPUGenerator(3);
  constexpr int64_t kHeads = 2, kKeyHeads = 1;
  attn::Inputs in;
  for (const attn::Input& i : attn::input_table()) {
    if (!i.wanted || !i.wanted(spec)) continue;
    std::vector<int64_t> shape;
    for (const char c : std::string(attn::shape(i, spec)))
      shape.push_back(c == 'B'               ? 1
                      : c == 'H'             ? kHeads
                      : c == 'G'             ? kKeyHeads
                      : c == 'T' || c == 'S' ? T
                      : std::isdigit(c)      ? c - '0'
                                             : D);
    at::Tensor x = at::randn(shape, g);
    if (i.role == attn::Role::gate) x = x.sigmoid();
    if (i.role == attn::Role::log_gate) x = at::log_sigmoid(x + 4);
    if (i.at == &attn::Inputs::slope) x = x.abs();
    in.*i.at = x.to(options);
  }
  if (packed)
    in.cu_seqlens =
        at::tensor({int64_t(0), T / 7, T / 3, T / 3 + 1, T / 2 + 9, T - T / 5, T}, at::kLong)
            .to(options.device());
  return in;
}

static void track(attn::Inputs& in) {
  for (const attn::Input& i : attn::input_table())
    if ((in.*i.at).defined() && has_gradient(i))
      in.*i.at = (in.*i.at).detach().clone().requires_grad_(true);
}

// Of elements whose truth is not NaN. (The gradients of the gates of a head may all be NaN in one
// process, as running sums give them.)
static double relative(const at::Tensor& x, const at::Tensor& truth) {
  const at::Tensor wanted = truth.to(at::kDouble);
  const at::Tensor error =
      (x.to(at::kDouble) - wanted).abs().masked_fill(wanted.isnan(), 0).nan_to_num(1e30);
  const double scale = wanted.nan_to_num(0).abs().max().item<double>();
  const double largest = error.max().item<double>();
  return scale > 0 ? largest / scale : largest;
}

// Bytes of this process that are in memory, or of its tensors on a GPU, at their peak since it was
// reset.
static int64_t resident(at::Device device, bool reset) {
  if (device.is_cuda()) {
    if (reset) train::begin_peak(device);
    return train::peak_allocated_bytes(device);
  }
  if (reset) std::ofstream("/proc/self/clear_refs") << "5";
  return std::stoll(proc_value("/proc/self/status", "VmHWM")) * 1024;
}

// Messages, by their bytes.
struct Messages {
  int64_t gathered = 0, passed = 0;

  attn::Split count(attn::Split split) {
    split.gather = [this, gather = split.gather](const at::Tensor& x) {
      gathered += int64_t(x.nbytes());
      return gather(x);
    };
    split.pass = [this, pass = split.pass](const at::Tensor& x) {
      passed += int64_t(x.nbytes());
      return pass(x);
    };
    return split;
  }
};

static Json attend(const std::string& variant, int64_t T, int64_t D, bool packed,
                   const at::TensorOptions& options, const train::Group& group,
                   const attn::Split& connected) {
  const attn::Spec spec = attn::find(variant).spec;
  const at::Device device = options.device();
  const train::Ranks& r = group.ranks();
  Messages messages;
  const attn::Split split = messages.count(connected);
  const at::Generator g = at::detail::createCPUGenerator(5);
  attn::Inputs all = inputs_of(spec, T, D, packed, options);
  if (const char* token = std::getenv("NAN_GATE")) {
    at::Tensor& gates = all.decay.defined() ? all.decay : all.channel_decay;
    gates.select(2, std::atoi(token)).fill_(NAN);
  }
  const at::Tensor d = at::randn({1, all.q.size(1), T, all.v.size(3)}, g).to(options);
  const int64_t n = T / r.world, from = r.rank * n;
  attn::Inputs own = tokens(all, from, from + n);
  own.cu_seqlens = all.cu_seqlens;
  track(own);
  const int64_t before = resident(device, true), sent = train::bytes_sent();
  const at::Tensor o = attend_split(spec, own, split);
  o.backward(d.narrow(2, from, n));
  static const char* const kTravels[] = {"states", "blocks of keys", "all keys"};
  const int64_t bytes = train::bytes_sent() - sent, peak = resident(device, false) - before;
  group.barrier();
  Json out{{"variant", variant},
           {"rank", r.rank},
           {"peak", peak},
           {"sent", bytes},
           {"gathered", messages.gathered},
           {"passed", messages.passed},
           {"backend", group.backend()},
           {"travels", kTravels[int(attn::travels(spec, own))]}};
  if (std::getenv("ALONE")) {  // the whole sequence in this process, in the same dtype
    track(all);
    const at::Tensor truth = attn::attend(spec, all);
    truth.backward(d);
    out["rows_of_nan"] = o.isnan().sum().item<int64_t>();
    out["same_nan"] = at::equal(o.isnan(), truth.isnan().narrow(2, from, n));
    Json errors;
    errors["o"] = relative(o.detach(), truth.detach().narrow(2, from, n));
    for (const attn::Input& i : attn::input_table()) {
      const at::Tensor& x = own.*i.at;
      if (!x.defined() || !x.requires_grad() || attn::axis_of(i, "TS") < 0) continue;
      errors[i.name] =
          relative(x.grad(), (all.*i.at).grad().narrow(attn::axis_of(i, "TS"), from, n));
    }
    out["errors"] = errors;
  }
  return out;
}

static int attend(const std::vector<std::string>& a) {
  at::TensorOptions options;
  for (size_t i = 5; i + 1 < a.size(); i += 2) {
    const std::string& value = a[i + 1];
    if (a[i] == "--device" && value == "cuda")
      options = options.device(device_of({.device = value}, train::ranks_from_environment()));
    if (a[i] == "--dtype" && value == "bfloat16") options = options.dtype(at::kBFloat16);
  }
  if (options.device().is_cuda()) train::use_own_stream(options.device());
  const train::Group group = join(options.device());
  const attn::Split split =
      train::make_split(group, train::context_of(group.ranks(), group.ranks().world));
  std::istringstream variants(a[1]);
  for (std::string each; variants >> each;) {
    const Json out =
        attend(each, std::stoll(a[2]), std::stoll(a[3]), a[4] == "1", options, group, split);
    std::cout << out.dump() << std::endl;
    group.barrier();
  }
  return 0;
}

static int differ() {
  const train::Group group = join();
  const nn::ModelConfig config = nn::preset("tiny");
  for (const char* last : {"auto", "reference"})
    check_travels(group,
                  {.batch = 2,
                   .length = 64,
                   .context_parallel = 2,
                   .execution = group.ranks().rank == 1 ? last : "auto"},
                  config, at::kCPU);
  group.barrier();
  return 0;
}

int main(int argc, char** argv) {
  const std::vector<std::string> a(argv + 1, argv + argc);
  try {
    if (a[0] == "steps") return steps(a[1], std::stoll(a[2]));
    if (a[0] == "reopen") return reopen(a[1], a[2], a[3]);
    if (a[0] == "attend") return attend(a);
    if (a[0] == "differ") return differ();
  } catch (const Error& e) {
    std::cerr << e.what() << "\n";
  }
  return 2;
}

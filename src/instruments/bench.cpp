#include "instruments/bench.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attn/inputs.h"
#include "attn/plan.h"
#include "core/machine.h"
#include "core/median.h"
#include "core/simd/isa.h"
#include "core/stopwatch.h"

namespace horner::instruments {

const Execution torch_sdpa{
    .name = "torch",
    .about = "at::scaled_dot_product_attention, causal",
    .why_not = [](const Spec&, const Inputs&) { return std::string(); },
    .run =
        [](const Spec&, const Inputs& in, Statistics*) {
          return at::scaled_dot_product_attention(in.q, in.k, in.v, {}, 0, /*is_causal=*/true);
        },
};

// The same by one of its backends on a GPU.
template <bool cudnn>
static at::Tensor run_backend(const Spec&, const Inputs& in, Statistics*) {
  at::Context& context = at::globalContext();
  const bool before[] = {context.userEnabledCuDNNSDP(), context.userEnabledFlashSDP(),
                         context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP()};
  auto allow = [&](bool a, bool b, bool c, bool d) {
    context.setSDPUseCuDNN(a), context.setSDPUseFlash(b);
    context.setSDPUseMemEfficient(c), context.setSDPUseMath(d);
  };
  allow(cudnn, !cudnn, false, false);
  const at::Tensor out =
      at::scaled_dot_product_attention(in.q, in.k, in.v, {}, 0, /*is_causal=*/true);
  allow(before[0], before[1], before[2], before[3]);
  return out;
}
static std::string no_backend(const Spec&, const Inputs& in) {
  if (!in.q.is_cuda()) return "the inputs are not on an NVIDIA GPU";
  const auto dtype = in.q.scalar_type();
  return dtype == at::kBFloat16 || dtype == at::kHalf ? "" : "bfloat16 and float16 only";
}
static const Execution torch_cudnn{"cudnn", "torch's attention by cuDNN", no_backend,
                                   run_backend<true>};
static const Execution torch_flash{"flash", "torch's attention by FlashAttention-2", no_backend,
                                   run_backend<false>};
static const Execution* const kPeers[] = {&torch_sdpa, &torch_cudnn, &torch_flash};

std::span<const Execution* const> peers() {
  return kPeers;
}

void wait_for(at::Device device) {
  if (!device.is_cpu())
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// An execution with its inputs, to be run repeatedly.
struct Runner {
  const Spec& spec;
  const Execution& execution;
  Inputs in;
  at::Tensor direction;  // the gradient of the output; undefined: forward only
  bool statistics;

  Runner(const Spec& s, const Execution& e, const Inputs& given, const at::Tensor& d,
         bool with_statistics = false)
      : spec(s), execution(e), in(given), direction(d), statistics(with_statistics) {
    for (const Input& i : input_table())
      if (at::Tensor& x = in.*i.at; x.defined() && i.role != Role::mask)
        x = x.detach().requires_grad_(direction.defined());
  }
  void run() const {
    const c10::AutoGradMode with_gradients(direction.defined());
    Statistics rows;
    const at::Tensor out = execution.run(spec, in, statistics ? &rows : nullptr);
    if (direction.defined()) out.backward(direction);
  }
  void reset() const {
    for (const Input& i : input_table())
      if (const at::Tensor& x = in.*i.at; x.defined()) x.mutable_grad() = at::Tensor();
  }
  double ms() const {
    if (!in.q.device().is_cpu()) return device_ms();
    const Stopwatch watch;
    run();
    const double ms = watch.ms();
    reset();
    return ms;
  }
  // By the device's clock, over several runs, so that it does not wait for this thread.
  double device_ms() const {
    constexpr int kRuns = 5;
    const at::Device device = in.q.device();
    c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    c10::Event end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    begin.record(stream);
    for (int i = 0; i < kRuns; ++i) run(), reset();
    end.record(stream);
    wait_for(device);
    return begin.elapsedTime(end) / kRuns;
  }
};

// Counts the bytes that torch allocates and frees on the threads where it is installed.
struct Meter : c10::MemoryReportingInfoBase {
  c10::DeviceType device;
  int64_t now = 0, most = 0;

  explicit Meter(c10::DeviceType d) : device(d) {}
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device on) override {
    if (on.type() == device) most = std::max(most, now += bytes);
  }
  bool memoryProfilingEnabled() const override { return true; }
};

static int64_t extra_bytes(const Runner& runner) {
  const auto meter = std::make_shared<Meter>(runner.in.q.device().type());
  const c10::DebugInfoGuard installed(c10::DebugInfoKind::PROFILER_STATE, meter);
  runner.run();
  runner.reset();
  return meter->most;
}

// Alternates with another runner, usually torch. Nothing if it was stopped.
static std::optional<Timing> timed(const Runner& runner, const Runner* torch,
                                   const Effort& effort) {
  constexpr int kLeast = 3, kMost = 30;
  constexpr double kEnough = 1000;  // ms
  auto again = [&](int runs, double spent) {
    if (effort.repeats > 0) return runs < effort.repeats;
    return runs < kLeast || (runs < kMost && spent < kEnough);
  };
  runner.ms();
  if (torch) torch->ms();
  std::vector<double> own, its;
  const Stopwatch spent;
  while (again(int(own.size()), spent.ms())) {
    if (effort.stop()) return {};
    if (torch) its.push_back(torch->ms());
    own.push_back(runner.ms());
  }
  Timing t{.ms = median(own),
           .best_ms = *std::min_element(own.begin(), own.end()),
           .runs = int(own.size())};
  if (torch) t.torch_ms = median(its);
  return t;
}

static at::Tensor direction_of(const Case& c) {
  if (!c.gradients) return {};
  return at::randn({c.B, c.H, c.T, c.E}, at::TensorOptions(c.dtype).device(c.device));
}

static std::string gigabytes(double bytes) {
  std::ostringstream s;
  s.precision(3);
  s << bytes / 1e9 << " GB";
  return s.str();
}

// "" or why the T x S matrices of the reference do not fit, estimated from a short run.
static std::string too_large(const Spec& spec, const Execution& e, const Case& c) {
  constexpr int64_t kShort = 256;
  if (&e != &execution("reference") || !c.device.is_cpu() || c.T <= kShort) return "";
  Case s = c;
  s.B = 1, s.T = s.S = kShort;
  const double times = double(c.B) * double(c.T) * double(c.S) / (kShort * kShort);
  const double need =
      times * double(extra_bytes({spec, e, random_inputs(spec, s), direction_of(s)}));
  if (need < 0.9 * free_bytes()) return "";
  return "its T x S matrices would need about " + gigabytes(need) + ", and " +
         gigabytes(free_bytes()) + " are free";
}

// A short case like `c`, longer than a tile and not a multiple of one.
static Case short_case(Case c) {
  c.B = std::min<int64_t>(c.B, 2);
  c.T = c.S = std::min<int64_t>(c.T, 130);
  return c;
}

Benchmark bench(const Spec& spec, const Execution& e, const Case& c, const Effort& effort,
                bool yardstick) try {
  const Inputs in = random_inputs(spec, c);
  Benchmark b{.why_not = e.why_not(spec, in)};
  if (b.why_not.empty()) b.why_not = too_large(spec, e, c);
  if (!b.why_not.empty()) {
    b.standing = Standing::cannot_run;
    return b;
  }
  const Verdict verdict = verify(spec, e, short_case(c));
  if (verdict.worst()) b.worst = *verdict.worst();
  if (!verdict.ok()) {
    b.standing = Standing::wrong;
    return b;
  }

  const Inputs plain{.q = in.q, .k = in.k, .v = in.v};
  auto time = [&](const at::Tensor& direction) {
    const Runner runner(spec, e, in, direction), torch(spec, torch_sdpa, plain, direction);
    auto t = timed(runner, yardstick ? &torch : nullptr, effort);
    if (t) t->flop = flop(spec, c, direction.defined());
    return t;
  };
  const at::Tensor direction = direction_of(c);
  b.forward = time({});
  if (b.forward && c.gradients) b.both = time(direction);
  if (!b.forward || (c.gradients && !b.both)) return {.standing = Standing::stopped};
  if (effort.statistics) {
    const Runner plain_forward(spec, e, in, {});
    const auto t = timed({spec, e, in, {}, true}, &plain_forward, effort);
    if (!t) return {.standing = Standing::stopped};
    b.statistics = t->ms / *t->torch_ms;
  }
  b.extra_bytes = extra_bytes({spec, e, in, direction});
  return b;
} catch (const c10::OutOfMemoryError&) {  // of a GPU; main memory is overcommitted, hence too_large
  return {.standing = Standing::cannot_run, .why_not = "out of memory"};
}

double flop(const Spec& spec, const Case& c, bool backward) {
  const double pairs = seen_pairs(spec.mask, c.T, c.S);
  const auto D = double(mapped_channels(spec, c.D)), E = double(c.E);
  // Forward: scores and sums. Backward: scores again, dw, dq and dk, dv.
  return 2 * double(c.B * c.H) * pairs * (backward ? 4 * D + 3 * E : D + E);
}

// The time of a product of n x n matrices, after a first one.
static double matmul_ms(int64_t n, at::ScalarType dtype, at::Device device) {
  const at::Tensor a = at::randn({n, n}, at::kFloat).to(dtype).to(device), b = a.t().contiguous();
  at::Tensor c = at::mm(a, b);
  wait_for(c.device());
  const Stopwatch watch;
  at::mm_out(c, a, b);
  wait_for(c.device());
  return watch.ms();
}

double matmul_gflops(at::ScalarType dtype, at::Device device) {
  constexpr int64_t kLargest = 2048;
  constexpr int kLeast = 3, kMost = 30;
  constexpr double kSlow = 100, kEnough = 600;  // ms
  int64_t n = kLargest / 8;                     // not every CPU has a fast product in float16
  while (n < kLargest && matmul_ms(n, dtype, device) < kSlow) n *= 2;
  double best = std::numeric_limits<double>::infinity();
  const Stopwatch spent;
  for (int i = 0; i < kLeast || (i < kMost && spent.ms() < kEnough); ++i)
    best = std::min(best, matmul_ms(n, dtype, device));
  return 2 * std::pow(double(n), 3) / best / 1e6;
}

double free_bytes() {
  const std::string kilobytes = proc_value("/proc/meminfo", "MemAvailable");
  return kilobytes.empty() ? std::numeric_limits<double>::infinity() : std::stod(kilobytes) * 1024;
}

std::string_view cpu_kernels() {
  return simd::name(simd::isa());
}

}  // namespace horner::instruments

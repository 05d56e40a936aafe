#include "instruments/bench_state.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "attn/rollback.h"
#include "core/median.h"
#include "core/stopwatch.h"
#include "instruments/bench.h"

namespace horner::instruments {

static Case tokens_case(const Stream& s, int64_t T, uint64_t seed) {
  Case c{.B = s.B, .H = s.H, .G = s.H, .T = T, .S = T, .D = s.D, .E = s.D, .seed = seed};
  c.dtype = s.dtype, c.device = s.device;
  return c;
}

static State empty_state(const Spec& spec, const Stream& s) {
  return make_state(spec, {s.B, s.H, s.D, s.D}, s.dtype, s.buffer, s.device);
}

std::string why_wrong(const Spec& spec, const Stream& s) {
  constexpr int64_t T = 150, kPrompt = 40;
  Case c = tokens_case(s, T, 1);
  c.gradients = false;
  const Trial t = trial(spec, c);
  State state = empty_state(spec, s);
  std::vector<at::Tensor> results{step(state, tokens(t.in, 0, kPrompt))};
  for (int64_t i = kPrompt; i < T; ++i) results.push_back(step(state, tokens(t.in, i, i + 1)));
  const Verdict verdict = judge(t, {at::cat(results, 2), {}});
  if (verdict.ok()) return "";
  std::ostringstream out;
  out << verdict.worst()->of << ": the error is " << verdict.worst()->error << ", and "
      << verdict.worst()->allowed << " is allowed";
  return out.str();
}

std::vector<DecodeTime> time_decoding(const Spec& spec, const Stream& s,
                                      const std::vector<int64_t>& contexts,
                                      const std::function<bool()>& stop) {
  constexpr int64_t kPrompt = 8192, kRun = 64;
  std::vector<DecodeTime> out;
  State state = empty_state(spec, s);
  const Inputs prompt = random_inputs(spec, tokens_case(s, kPrompt, 2)),
               next = random_inputs(spec, tokens_case(s, kRun, 3));
  for (int64_t context : contexts) {
    while (state.tokens < context && !stop())
      step(state, tokens(prompt, 0, std::min(kPrompt, context - state.tokens)));
    std::vector<double> us;
    std::optional<Mark> start;  // of a KV cache: each run begins after `context` tokens
    if (!state.finite) start = mark(state, kRun);
    for (int run = 0; run <= s.runs && !stop(); ++run) {
      wait_for(s.device);
      const Stopwatch watch;
      for (int64_t t = 0; t < kRun; ++t) step(state, tokens(next, t, t + 1));
      wait_for(s.device);
      if (run > 0) us.push_back(watch.ms() / kRun * 1e3);
      if (start) undo(state, *start);
    }
    if (us.empty()) break;
    out.push_back({median(us), bytes(state), context});
  }
  return out;
}

double state_gflops(const Spec& spec, const Stream& s, int64_t T) {
  const c10::NoGradGuard without_gradients;
  const Inputs in = random_inputs(spec, tokens_case(s, T, 4));
  State state = empty_state(spec, s);
  step(state, in);
  std::vector<double> seconds;
  for (int run = 0; run < 15; ++run) {
    wait_for(s.device);
    const Stopwatch watch;
    step(state, in);
    wait_for(s.device);
    seconds.push_back(watch.ms() / 1e3);
  }
  const double F = feature_count(spec, s.D);
  return 4 * F * double(s.D) * double(T * s.B * s.H) / median(seconds) / 1e9;
}

}  // namespace horner::instruments

#include "train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "core/check.h"
#include "core/stopwatch.h"
#include "nn/checkpoint.h"
#include "train/batch.h"
#include "train/checkpoint.h"
#include "train/graph.h"
#include "train/machine.h"
#include "train/start.h"

namespace horner::train {

namespace fs = std::filesystem;

namespace {

struct Session {
  const Settings& s;
  const Source& source;
  const fs::path folder;
  const Watch& watch;
  at::Device device;
  nn::Model model;
  nn::Run run;
  Optimizer optimizer;
  Position at;
  StepNumbers numbers;
  at::Tensor tokens, targets, shares;   // [P, b, T], [P, b, T], [P]: of a step, on the device
  std::shared_ptr<CapturedWork> graph;  // the step, once it is captured
  double peak, flops_per_token;         // a second; of a step
  std::vector<double> rates;            // tokens a second, of every step here
  double validation = std::nan(""), accuracy = std::nan("");
};

at::Device device_of(const Settings& s) {
  check(s.device != "cuda" || at::hasCUDA(), "no device 'cuda' here: torch finds no GPU");
  return s.device == "cuda" || (s.device == "auto" && at::hasCUDA()) ? at::Device(at::kCUDA, 0)
                                                                     : at::Device(at::kCPU);
}

int64_t sequences_at_once(const Settings& s) {
  const int64_t b = s.at_once > 0 ? s.at_once : s.batch;
  check(s.batch % b == 0, "a batch of ", s.batch, " sequences is no multiple of ", b, " at once");
  return b;
}

// Products of matrices alone, forward and backward: 6 a weight, and the two of attention over the
// half of the scores that a causal mask leaves.
double step_flops_per_token(const nn::Model& m, int64_t T) {
  const nn::ModelConfig& c = m.config;
  int64_t weights = c.V * c.C;  // the head
  for (nn::Model copy = m; const nn::Slot& s : nn::slots(copy))
    if (s.shape.size() == 2 && s.name.find("embed") == std::string::npos &&
        s.name.find("wte") == std::string::npos && s.name.find("wpe") == std::string::npos &&
        s.name != "lm_head.weight")
      weights += s.at->numel();
  return 6 * double(weights) + 6 * double(int64_t(c.layers.size()) * c.H * c.D * T);
}

Batch step_batch(const Session& t, int64_t step) {
  return make_batch(t.source, Split::train, uint64_t(step * t.s.batch), t.s.batch,
                    sequences_at_once(t.s), t.s.length, t.model.config.V);
}

// A whole step on tensors that stay where they are.
void step_work(Session& t) {
  clear_gradients(t.optimizer);
  t.numbers.loss.zero_();
  const int64_t parts = t.tokens.size(0);
  for (int64_t i = 0; i < parts; ++i) {
    const at::Tensor x = nn::hidden(t.model, t.tokens[i], t.run);
    const at::Tensor loss =
        nn::cross_entropy(t.model, x.reshape({-1, t.model.config.C}), t.targets[i].reshape({-1})) *
        t.shares[i];
    loss.backward();
    t.numbers.loss.add_(loss.detach());
  }
  update(t.optimizer, t.s, t.numbers);
}

void put_batch(Session& t, const Batch& b) {
  double all = 0;
  for (const int64_t n : b.counts) all += double(n);
  at::Tensor shares = at::empty({t.shares.size(0)}, at::kFloat);
  for (size_t i = 0; i < b.counts.size(); ++i)
    shares.data_ptr<float>()[i] = float(double(b.counts[i]) / std::max(1.0, all));
  t.tokens.copy_(b.tokens), t.targets.copy_(b.targets), t.shares.copy_(shares);
}

double limit(const Session& t, const Window& w) {
  const double x = t.s.on_spike == "note" ? DBL_MAX : at_z_score(w, t.s.spike);
  return std::min(x, double(FLT_MAX));
}

void start_step(Session& t, const Batch& b) {
  constexpr int64_t kBeforeCapture = 3;  // steps in which libraries make up their minds
  put_batch(t, b);
  t.numbers.rate.fill_(learning_rate(t.s, t.at.step));
  t.numbers.limits[0].fill_(limit(t, t.at.losses));
  t.numbers.limits[1].fill_(limit(t, t.at.norms));
  if (t.device.is_cuda() && t.s.graph && !t.graph && int64_t(t.rates.size()) >= kBeforeCapture)
    t.graph = capture([&] { step_work(t); });
  if (t.graph)
    launch(*t.graph);
  else
    step_work(t);
}

Json number(double x) {
  return std::isfinite(x) ? Json(x) : Json(nullptr);
}
Json number(const std::optional<double>& x) {
  return x ? Json(*x) : Json(nullptr);
}

// Where it went wrong: the first layer whose attention is no number, else the first parameter,
// on the way back, whose gradient is none, else the one with the longest.
std::string blame(Session& t, bool broken) {
  if (broken) {
    const int64_t layer = first_broken_layer(t.model, t.run, t.tokens[0]);
    if (layer >= 0) return "layer " + std::to_string(layer) + ", attention";
  }
  const at::Tensor norms = t.numbers.norms.cpu();
  const float* const n = norms.data_ptr<float>();
  size_t worst = 0;
  for (size_t i = 0; i < t.optimizer.parameters.size(); ++i)
    if (!std::isfinite(n[i]) || (std::isfinite(n[worst]) && n[i] > n[worst])) worst = i;
  const Parameter& p = t.optimizer.parameters[worst];
  return (p.layer >= 0 ? "layer " + std::to_string(p.layer) + ", " : "") + p.name;
}

// A step that must not be taken, or should be looked at. Throws where the run is to stop.
void note_event(Session& t, double loss, double norm, bool broken, bool skipped) {
  const std::string where = blame(t, broken);
  write_journal(t.folder / "metrics.jsonl",
                {{"step", t.at.step + 1},
                 {"event", broken ? "nan" : "spike"},
                 {"where", where},
                 {"skipped", skipped},
                 {"loss_z", number(z_score(t.at.losses, loss))},
                 {"gradient_norm_z", number(z_score(t.at.norms, norm))}});
  char text[256];
  std::snprintf(text, sizeof text, "step %lld: loss %g, gradient %g: %s %s",
                static_cast<long long>(t.at.step + 1), loss, norm,
                broken ? "no numbers, first in" : "a jump, most in", where.c_str());
  const std::string& what = broken ? t.s.on_nan : t.s.on_spike;
  t.watch.say(std::string(text) + (skipped ? "; the step is skipped" : ""));
  if (what != "stop") return;
  save_checkpoint(t.folder, t.model, t.optimizer, t.at, t.s.keep);
  fail(text, "; the run stops before this step (--on-", broken ? "nan" : "spike",
       " skip goes on without it, after --resume)");
}

// What came out of the step, once it is done.
void finish_step(Session& t, double seconds) {
  const double loss = t.numbers.loss.item<float>(), norm = t.numbers.norm.item<float>();
  const bool broken = !std::isfinite(loss) || !std::isfinite(norm);
  const auto loss_z = z_score(t.at.losses, loss), norm_z = z_score(t.at.norms, norm);
  const bool spike = !broken && std::max(loss_z.value_or(0), norm_z.value_or(0)) > t.s.spike;
  const bool skipped = broken || loss > limit(t, t.at.losses) || norm > limit(t, t.at.norms);
  if (broken || spike) note_event(t, loss, norm, broken, skipped);
  t.at.spikes += spike || broken, t.at.skipped += skipped;
  if (!skipped) add(t.at.losses, loss), add(t.at.norms, norm);
  const double rate = learning_rate(t.s, t.at.step);
  ++t.at.step;
  t.rates.push_back(double(t.s.batch * t.s.length) / seconds);
  t.at.seconds += seconds;
  Json line = {{"step", t.at.step},
               {"loss", number(loss)},
               {"loss_z", number(loss_z)},
               {"gradient_norm", number(norm)},
               {"gradient_norm_z", number(norm_z)},
               {"learning_rate", rate},
               {"tokens_per_second", t.rates.back()}};
  if (t.s.entropy_every > 0 && t.at.step % t.s.entropy_every == 0) {
    const at::Tensor some = t.tokens[0].narrow(0, 0, std::min<int64_t>(4, t.tokens.size(1)));
    line["entropy"] = row_entropies(t.model, t.run, some);
  }
  write_journal(t.folder / "metrics.jsonl", line);
  const double share = t.rates.back() * t.flops_per_token / t.peak;
  t.watch.progress({t.at.step, t.s.steps, loss, norm, rate, t.rates.back(), share,
                    double(t.s.steps - t.at.step) * seconds, t.validation});
}

void validate(Session& t) {
  if (t.s.evaluate_sequences == 0) return;
  const Score score = evaluate(t.model, t.run, t.source, t.s, 0, t.s.evaluate_sequences);
  t.validation = score.loss / score.count, t.accuracy = score.right / score.count;
  write_journal(t.folder / "metrics.jsonl", {{"step", t.at.step},
                                             {"validation_loss", number(t.validation)},
                                             {"validation_accuracy", number(t.accuracy)}});
}

double median(std::vector<double> x) {
  if (x.empty()) return 0;
  std::nth_element(x.begin(), x.begin() + int64_t(x.size() / 2), x.end());
  return x[x.size() / 2];
}

Json result(const Session& t) {
  double last = 0;
  for (const double x : t.at.losses.values) last += x / double(t.at.losses.values.size());
  const double speed = median(t.rates);
  return {{"finished", true},
          {"steps", t.at.step},
          {"train_loss", number(last)},
          {"validation_loss", number(t.validation)},
          {"validation_accuracy", number(t.accuracy)},
          {"parameters", nn::parameter_count(t.model)},
          {"seconds", t.at.seconds},
          {"tokens_per_second", speed},
          {"share_of_peak", speed * t.flops_per_token / t.peak},
          {"peak_bytes", peak_bytes(t.device)},
          {"spikes", t.at.spikes},
          {"skipped", t.at.skipped},
          {"device", device_name(t.device)}};
}

Session open_session(const Settings& s, const Source& source, const fs::path& folder,
                     const Watch& watch) {
  const at::Device device = device_of(s);
  use_own_stream(device);
  begin_peak(device);
  const auto last = newest_checkpoint(folder);
  Session t{s, source, folder, watch, device, last ? nn::load_model(*last) : start_model(s)};
  t.run.execution = s.execution;
  t.optimizer = make_optimizer(t.model, device);
  if (last) {
    t.at = load_checkpoint(*last, t.optimizer);
    watch.say("goes on from " + last->string());
  }
  t.numbers = step_numbers(t.optimizer);
  const int64_t b = sequences_at_once(s);
  t.tokens = at::zeros({s.batch / b, b, s.length}, at::TensorOptions(device).dtype(at::kLong));
  t.targets = at::zeros_like(t.tokens);
  t.shares = at::zeros({s.batch / b}, t.numbers.loss.options());
  t.peak = matmul_peak(device, s.dtype == "float32" ? at::kFloat : at::kBFloat16);
  t.flops_per_token = step_flops_per_token(t.model, s.length);
  return t;
}

bool is_time(int64_t step, int64_t every) {
  return every > 0 && step % every == 0;
}

}  // namespace

Outcome train(const Settings& s, const Source& source, const fs::path& folder, bool resume,
              const Watch& watch) {
  check_settings(s);
  if (!claim_folder(folder, s, resume)) return {true, s.steps, read_json(folder / "result.json")};
  if (s.threads > 0) at::set_num_threads(int(s.threads));
  Session t = open_session(s, source, folder, watch);
  rewind_journal(folder / "metrics.jsonl", t.at.step);
  if (t.at.step < s.steps) {
    Batch next = step_batch(t, t.at.step);
    while (t.at.step < s.steps) {
      const Stopwatch clock;
      start_step(t, next);
      if (t.at.step + 1 < s.steps) next = step_batch(t, t.at.step + 1);  // while the device works
      wait_for(t.device);
      finish_step(t, clock.ms() / 1e3);
      const bool last = t.at.step == s.steps, stop = !last && watch.stop();
      if (last || is_time(t.at.step, s.evaluate_every)) validate(t);
      if (last || stop || is_time(t.at.step, s.checkpoint_every))
        save_checkpoint(folder, t.model, t.optimizer, t.at, s.keep);
      if (stop) return {false, t.at.step, {}};
    }
  } else {
    validate(t);  // it was stopped between its last checkpoint and its result
  }
  const Json done = result(t);
  write_json(folder / "result.json", done);
  return {true, t.at.step, done};
}

}  // namespace horner::train

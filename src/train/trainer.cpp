#include "train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "core/check.h"
#include "core/median.h"
#include "core/pages.h"
#include "core/stopwatch.h"
#include "files/json.h"
#include "files/lock.h"
#include "nn/pattern.h"
#include "train/events.h"
#include "train/machine.h"
#include "train/session.h"
#include "train/trace.h"

namespace horner::train {

namespace fs = std::filesystem;

namespace {

// A session and what is reported of it.
struct Trainer {
  Session t;
  const fs::path folder;
  const Hooks& hooks;
  double flops_per_token = 0;
  double peak = std::nan("");      // FLOP/s of matrix products on all ranks, if measured
  std::vector<double> rates = {};  // tokens/s of every step of this process
  double validation = std::nan(""), accuracy = std::nan("");
  std::unique_ptr<EventFile> events = nullptr;  // null without --tensorboard
  bool terminated = false;                      // some rank, by SIGTERM
  std::vector<fs::path> damaged = {};           // checkpoints that the run does not resume from
};

double limit(const Session& t, const Window& w) {
  const double x = t.s.on_spike == "note" ? DBL_MAX : at_z_score(w, t.s.spike);
  return std::min(x, double(FLT_MAX));
}

// Writes a line of metrics.jsonl, and its numbers to TensorBoard.
void write(const Trainer& r, const Json& line) {
  if (!r.t.first()) return;
  write_journal(r.folder / "metrics.jsonl", line);
  if (!r.events) return;
  std::vector<Scalar> scalars;
  for (const auto& [name, x] : line.items()) {
    if (name != "step" && x.is_number()) scalars.push_back({name, x.get<float>()});
    for (size_t i = 0; x.is_array() && i < x.size(); ++i)
      if (x[i].is_number())
        scalars.push_back({name + "/layer_" + std::to_string(i), x[i].get<float>()});
  }
  if (!scalars.empty()) r.events->add(line["step"], scalars);
}

// No rank leaves before the checkpoint is there: a launcher ends the others when one does.
void save(const Trainer& r) {
  const Session& t = r.t;
  if (t.shards) t.shards->wait_weights(t.optimizer.parameters.size());
  if (t.shards)
    save_checkpoint(r.folder, t.model, t.optimizer, t.at, t.s.keep, t.group);
  else if (t.first())
    save_checkpoint(r.folder, t.model, t.optimizer, t.at, t.s.keep);
  t.group.barrier();
}

bool is_time(int64_t step, int64_t every) {
  return every > 0 && step % every == 0;
}

Json number(double x) {
  return std::isfinite(x) ? Json(x) : Json(nullptr);
}
Json numbers(const std::vector<double>& all) {
  Json out = Json::array();
  for (const double x : all) out.push_back(number(x));
  return out;
}
Json number(const std::optional<double>& x) {
  return x ? Json(*x) : Json(nullptr);
}

// Where a NaN or a spike appeared: the first layer whose attention is not finite, else the first
// parameter of the backward pass whose gradient is not finite, else the largest gradient.
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

// Reports a spike or a NaN. Throws if the settings say to stop.
void note_event(Trainer& r, double loss, double norm, bool broken, bool skipped) {
  Session& t = r.t;
  const std::string where = blame(t, broken);
  write(r, {{"step", t.at.step + 1},
            {"event", broken ? "nan" : "spike"},
            {"where", where},
            {"skipped", skipped},
            {"loss_z", number(z_score(t.at.losses, loss))},
            {"gradient_norm_z", number(z_score(t.at.norms, norm))}});
  char text[256];
  std::snprintf(text, sizeof text, "step %lld: loss %g, gradient norm %g: %s %s",
                static_cast<long long>(t.at.step + 1), loss, norm,
                broken ? "NaN or infinite, first in" : "spike, largest in", where.c_str());
  const std::string& what = broken ? t.s.on_nan : t.s.on_spike;
  if (t.first()) r.hooks.say(std::string(text) + (skipped ? "; skipping the step" : ""));
  if (what != "stop") return;
  save(r);
  fail(text, "; stopped before this step (resume with --resume --on-", broken ? "nan" : "spike",
       " skip to continue without it)");
}

// Records a step that is done.
void finish_step(Trainer& r, double seconds) {
  Session& t = r.t;
  const double loss = t.numbers.loss.item<float>(), norm = t.numbers.norm.item<float>();
  const bool broken = !std::isfinite(loss) || !std::isfinite(norm);
  const auto loss_z = z_score(t.at.losses, loss), norm_z = z_score(t.at.norms, norm);
  const bool spike = !broken && std::max(loss_z.value_or(0), norm_z.value_or(0)) > t.s.spike;
  const bool skipped = broken || loss > limit(t, t.at.losses) || norm > limit(t, t.at.norms);
  if (broken || spike) note_event(r, loss, norm, broken, skipped);
  t.at.spikes += spike || broken, t.at.skipped += skipped;
  if (!skipped) add(t.at.losses, loss), add(t.at.norms, norm);
  const double rate = learning_rate(t.s, t.at.step);
  ++t.at.step;
  r.rates.push_back(double(t.s.batch * t.s.length) / seconds);
  t.at.seconds += seconds;
  Json line = {{"step", t.at.step},
               {"loss", number(loss)},
               {"loss_z", number(loss_z)},
               {"gradient_norm", number(norm)},
               {"gradient_norm_z", number(norm_z)},
               {"learning_rate", rate},
               {"tokens_per_second", r.rates.back()}};
  if (t.first() && is_time(t.at.step, t.s.entropy_every)) {
    const at::Tensor some = t.tokens[0].narrow(0, 0, std::min<int64_t>(4, t.tokens.size(1)));
    const RowMeans rows = row_means(t.model, t.run, some);
    line["entropy"] = numbers(rows.entropy), line["separability"] = numbers(rows.separability);
  }
  write(r, line);
  if (!t.first()) return;
  if (r.hooks.measure_peak && std::isnan(r.peak))
    r.peak = matmul_peak(t.device, t.run.compute) * t.group.ranks().world;
  r.hooks.progress({t.at.step, t.s.steps, loss, norm, rate, r.rates.back(),
                    double(t.s.steps - t.at.step) * seconds,
                    r.rates.back() * r.flops_per_token / r.peak, r.validation});
}

// Every rank evaluates its share of the sequences.
Score validation_score(const Session& t, const Settings& s) {
  const int64_t n = s.evaluate_sequences, group = t.context.group, groups = t.context.groups;
  const Score part =
      evaluate(t.model, t.run, t.source, s, n * group / groups, n * (group + 1) / groups);
  const at::Tensor sums = at::tensor({part.loss, part.right, part.count}, at::kDouble);
  t.group.sum(sums);
  const double* const all = sums.data_ptr<double>();
  return {all[0], all[1], all[2]};
}

void validate(Trainer& r) {
  const Session& t = r.t;
  if (t.s.evaluate_sequences == 0) return;
  const Score all = validation_score(t, t.s);
  r.validation = all.loss / all.count, r.accuracy = all.right / all.count;
  write(r, {{"step", t.at.step},
            {"validation_loss", number(r.validation)},
            {"validation_accuracy", number(r.accuracy)}});
}

// Whether any rank was asked to stop, or received SIGTERM.
bool stops(Trainer& r) {
  const Group& group = r.t.group;
  if (group.ranks().world == 1) return r.hooks.stop();
  const bool stop = r.hooks.stop(), terminated = group.terminated();
  const at::Tensor asked = at::tensor({double(stop), double(terminated)}, at::kDouble);
  group.sum(asked);
  r.terminated = asked[1].item<double>() > 0;
  return asked.sum().item<double>() > 0;
}

// At other lengths than that of training, with as many tokens in a pass.
Json scores_by_length(const Session& t) {
  Json out = Json::array();
  if (t.s.evaluate_sequences == 0) return out;
  for (const int64_t length : evaluated_lengths(t.s)) {
    Settings s = t.s;
    s.length = length, s.batch = std::max<int64_t>(1, t.s.batch * t.s.length / length);
    if (s.micro_batch > 0) s.micro_batch = std::min(s.micro_batch, s.batch);
    const Score all = validation_score(t, s);
    out.push_back({{"length", length},
                   {"validation_loss", number(all.loss / all.count)},
                   {"validation_accuracy", number(all.right / all.count)}});
  }
  return out;
}

Json result(const Trainer& r) {
  const Session& t = r.t;
  double last = 0;
  for (const double x : t.at.losses.values) last += x / double(t.at.losses.values.size());
  const double speed = r.rates.empty() ? 0 : median(r.rates);
  return {{"finished", true},
          {"steps", t.at.step},
          {"train_loss", number(last)},
          {"validation_loss", number(r.validation)},
          {"validation_accuracy", number(r.accuracy)},
          {"lengths", scores_by_length(t)},
          {"parameters", nn::parameter_count(t.model)},
          {"state_numbers", state_numbers(t.model.config, t.s.length)},
          {"attention", nn::pattern_text(nn::variants_of(t.model.config))},
          {"seconds", t.at.seconds},
          {"tokens_per_second", speed},
          {"flops_per_token", r.flops_per_token},
          {"flops_per_second", speed * r.flops_per_token},
          {"share_of_peak", number(speed * r.flops_per_token / r.peak)},
          {"peak_bytes", peak_bytes(t.device)},
          {"peak_allocated_bytes", peak_allocated_bytes(t.device)},
          {"spikes", t.at.spikes},
          {"skipped", t.at.skipped},
          {"processes", t.group.ranks().world},
          {"device", device_name(t.device)}};
}

// The first writes of this process to the folder.
void open_files(Trainer& r) {
  if (!r.t.first()) return;
  for (const fs::path& checkpoint : r.damaged) set_aside(checkpoint);
  files::write_json(r.folder / "settings.json", to_json(r.t.s));
  rewind_journal(r.folder / "metrics.jsonl", r.t.at.step);
  if (r.t.s.tensorboard) r.events = std::make_unique<EventFile>(r.folder, r.t.at.step + 1);
}

// Runs the remaining steps. Returns false if interrupted.
bool run_steps(Trainer& r) {
  Session& t = r.t;
  const Settings& s = t.s;
  Batch next = std::move(t.first_batch);
  while (t.at.step < s.steps) {
    const Stopwatch clock;
    start_step(t, next, limit(t, t.at.losses), limit(t, t.at.norms));
    if (t.at.step + 1 < s.steps) next = step_batch(t, t.at.step + 1);  // while the device is busy
    wait_for(t.device);
    const double seconds = clock.ms() / 1e3;
    if (t.steps_here == 1)
      open_files(r);  // whatever can be wrong with the settings has shown by now
    finish_step(r, seconds);
    const bool last = t.at.step == s.steps, stop = !last && stops(r);
    if (last || is_time(t.at.step, s.evaluate_every)) validate(r);
    if (last || stop || is_time(t.at.step, s.checkpoint_every)) save(r);
    if (stop) return false;
  }
  return true;
}

// Only rank 0 reads and writes the folder. Returns false if the run is finished.
bool may_run(const Group& group, const fs::path& folder, const Settings& s, Begin begin) {
  const at::Tensor open = at::zeros({}, at::kDouble);
  if (group.ranks().rank == 0) open.fill_(check_run(folder, s, begin) ? 1.0 : 0.0);
  if (group.ranks().world > 1) group.broadcast({open});
  return open.item<double>() > 0;
}

void announce(const Found& found, const Hooks& hooks) {
  for (const Found::Damaged& d : found.damaged)
    hooks.say("warning: " + d.checkpoint.string() + " is damaged (" + d.why +
              "); it is set aside as " + d.checkpoint.filename().string() + ".damaged");
  check(found.whole || found.damaged.empty(),
        "no checkpoint is left to resume from; to begin again at step 0, remove ",
        found.damaged.empty() ? "" : found.damaged.back().checkpoint.string(),
        found.damaged.size() > 1 ? " and the others" : "");
  if (found.whole) hooks.say("resuming from " + found.whole->string());
}

// Which layers have which variant, where they differ.
void announce_layers(const nn::ModelConfig& c, const Hooks& hooks) {
  const std::vector<nn::LayersOf> all = nn::by_variant(nn::variants_of(c));
  if (all.size() == 1) return;
  for (const nn::LayersOf& each : all) hooks.say("layers " + each.text() + ": " + each.variant);
}

}  // namespace

Outcome train(const Settings& s, const Source& source, const fs::path& folder, Begin begin,
              const Hooks& hooks) {
  check_settings(s);
  if (s.threads > 0) at::set_num_threads(int(s.threads));
  keep_pages();
  const Ranks ranks = ranks_from_environment();
  const at::Device device = device_of(s, ranks);
  Group group;
  if (ranks.world > 1)
    group = Group(ranks, {.device = device, .backend = s.backend, .lost = hooks.lost});
  check_same(group, s, source);
  std::optional<files::FolderLock> lock;
  if (ranks.rank == 0) lock.emplace(folder);
  if (lock && !lock->warning().empty()) hooks.say("warning: " + lock->warning());
  if (!may_run(group, folder, s, begin)) {
    const fs::path file = folder / "result.json";
    return {true, s.steps, ranks.rank == 0 ? files::read_json(file) : Json()};
  }
  const Found found = ranks.rank == 0 ? find_checkpoint(folder) : Found();
  announce(found, hooks);
  Trainer r{open_session({s, source, folder, found.whole, std::move(group)}), folder, hooks};
  for (const Found::Damaged& d : found.damaged) r.damaged.push_back(d.checkpoint);
  if (r.t.first()) announce_layers(r.t.model.config, hooks);
  r.flops_per_token = step_flops_per_token(r.t.model, s.length);
  if (r.t.at.step >= s.steps)
    open_files(r), validate(r);  // interrupted between the last checkpoint and the result
  else if (!run_steps(r))
    return {false, r.t.at.step, {}, r.terminated};
  const Json done = result(r);
  write_trace(ranks.rank);
  if (r.t.first()) files::write_json(folder / "result.json", done);
  return {true, r.t.at.step, done};
}

}  // namespace horner::train

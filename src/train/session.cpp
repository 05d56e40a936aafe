#include "train/session.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attn/plan.h"
#include "core/check.h"
#include "nn/checkpoint.h"
#include "train/start.h"
#include "train/trace.h"

namespace horner::train {

at::Device device_of(const Settings& s, const Ranks& ranks) {
  check(s.device != "cuda" || at::hasCUDA(),
        "device 'cuda' is not available: torch finds no GPU (see 'horner info')");
  const bool cuda = s.device == "cuda" || (s.device == "auto" && at::hasCUDA());
  const auto count = cuda ? int64_t(at::getNumGPUs()) : 0;
  return cuda ? at::Device(at::kCUDA, c10::DeviceIndex(ranks.local_rank % count)) : at::kCPU;
}

double step_flops_per_token(const nn::Model& m, int64_t T) {
  const nn::ModelConfig& c = m.config;
  int64_t weights = c.V * c.C;  // the head
  nn::Model copy = m;
  for (const nn::Slot& s : nn::slots(copy)) {
    const bool table = s.at == &copy.embedding || s.at == &copy.positions || s.at == &copy.head;
    if (s.shape.size() == 2 && !table) weights += s.at->numel();
  }
  return 6 * double(weights) + 6 * double(int64_t(c.layers.size()) * c.H * c.D * T);
}

double state_numbers(const nn::ModelConfig& c, int64_t T) {
  double out = 0;
  for (const nn::LayerConfig& l : c.layers)
    for (const nn::Part& p : l.parts) {
      const double features = attn::feature_count(p.attention, c.D);
      const double sums = features * double(c.D + attn::is<attn::Sum>(p.attention.denominator));
      const auto* near = std::get_if<attn::Window>(&p.attention.near);
      const int64_t keys = !std::isfinite(features) ? T
                           : near                   ? std::min<int64_t>(near->size, T)
                                                    : 0;
      out += double(p.around.mamba ? c.H : int64_t(p.key_heads.size())) *
             ((std::isfinite(sums) ? sums : 0) + double(2 * c.D * keys));
    }
  return out;
}

static Batch batch_of(const Settings& s, const Source& source, const Context& c, int64_t V,
                      int64_t step) {
  const Share share = share_of(s, c);
  const Batch all = make_batch(source, Split::train, uint64_t(step * s.batch + c.group * share.all),
                               share.all, share.micro_batch, s.length, V);
  return part_of(all, c.part, c.parts);
}

Batch step_batch(const Session& t, int64_t step) {
  return batch_of(t.s, t.source, t.context, t.model.config.V, step);
}

// A whole step, on tensors at fixed addresses.
static void step_work(Session& t) {
  t.shards ? t.shards->clear() : clear_gradients(t.optimizer);
  t.numbers.loss.zero_();
  const int64_t parts = t.tokens.size(0);
  for (int64_t i = 0; i < parts; ++i) {
    const at::Tensor loss = [&] {
      const Traced trace("forward");
      const at::Tensor x = nn::hidden(t.model, t.tokens[i], t.run).reshape({-1, t.model.config.C});
      return nn::cross_entropy(t.model, x, t.targets[i].reshape({-1})) * t.shares[i];
    }();
    const bool last = i + 1 == parts;
    t.shards ? t.shards->backward(loss, last) : t.average.backward(loss, last);
    t.numbers.loss.add_(loss.detach());
  }
  if (t.group.ranks().world > 1) {
    t.group.sum(t.numbers.loss);
    t.numbers.loss.div_(t.group.ranks().world);
  }
  if (!t.shards) return update(t.optimizer, t.s, t.numbers);
  update(t.optimizer, t.s, t.numbers, t.group);
  t.shards->send_weights();
}

// A micro-batch is weighted by its share of all ranks' targets; gradients are means over ranks.
static void put_batch(Session& t, const Batch& b) {
  at::Tensor all = at::zeros({}, at::kDouble), shares = at::empty({t.shares.size(0)}, at::kFloat);
  for (const int64_t n : b.counts) all += double(n);
  if (t.group.ranks().world > 1) t.group.sum(all);
  const double mean = std::max(1.0, all.item<double>()) / t.group.ranks().world;
  for (size_t i = 0; i < b.counts.size(); ++i)
    shares.data_ptr<float>()[i] = float(double(b.counts[i]) / mean);
  t.tokens.copy_(b.tokens), t.targets.copy_(b.targets), t.shares.copy_(shares);
}

void start_step(Session& t, const Batch& b, double loss_limit, double norm_limit) {
  constexpr int64_t kBeforeCapture = 3;  // steps in which libraries choose their kernels
  put_batch(t, b);
  t.numbers.rate.fill_(learning_rate(t.s, t.at.step));
  t.numbers.limits[0].fill_(loss_limit);
  t.numbers.limits[1].fill_(norm_limit);
  const bool capturable = t.device.is_cuda() && t.s.graph && t.group.ranks().world == 1;
  if (capturable && !t.graph && t.steps_here >= kBeforeCapture)
    t.graph = capture([&] { step_work(t); });
  if (t.graph)
    launch(*t.graph);
  else
    step_work(t);
  ++t.steps_here;
}

// Broadcasts a position as numbers: {step, spikes, skipped, seconds, sizes of the windows of losses
// and norms, their values}.
static void share_position(const Group& group, Position& p) {
  constexpr int64_t kHead = 6;
  at::Tensor x = at::zeros({kHead + 2 * int64_t(Window::kSize)}, at::kDouble);
  double* const n = x.data_ptr<double>();
  const double head[kHead] = {double(p.step),
                              double(p.spikes),
                              double(p.skipped),
                              p.seconds,
                              double(p.losses.values.size()),
                              double(p.norms.values.size())};
  std::copy(head, head + kHead, n);
  std::copy(p.losses.values.begin(), p.losses.values.end(), n + kHead);
  std::copy(p.norms.values.begin(), p.norms.values.end(), n + kHead + Window::kSize);
  group.broadcast({x});
  p = {int64_t(n[0]), int64_t(n[1]), int64_t(n[2]), n[3]};
  p.losses.values.assign(n + kHead, n + kHead + size_t(n[4]));
  p.norms.values.assign(n + kHead + Window::kSize, n + kHead + Window::kSize + size_t(n[5]));
}

static Optimizer own_optimizer(const Opening& o, nn::Model& model, at::Device device,
                               std::unique_ptr<Shards>& shards) {
  if (o.s.shard == "none" || o.group.ranks().world == 1) return make_optimizer(model, device);
  constexpr double kMB = 1e6;
  const Sharding sharding{o.s.shard == "gradients", int64_t(o.s.bucket * kMB)};
  return make_optimizer(model, device, o.group, sharding, shards);
}

// Gives the other ranks, which may not see the files of rank 0, the weights and the optimizer; with
// shards they read their parts of it.
static void share_start(const Opening& o, Optimizer& optimizer, bool sharded, Position& at) {
  if (o.group.ranks().world == 1) return;
  std::vector<at::Tensor> all;
  for (const Parameter& p : optimizer.parameters) all.push_back(p.at.detach());
  if (!sharded)
    for (const Piece& p : optimizer.pieces) all.insert(all.end(), {p.mean, p.square});
  all.push_back(optimizer.count);
  o.group.broadcast(all);
  share_position(o.group, at);
  if (!sharded || o.group.ranks().rank == 0 || at.step == 0) return;
  const std::filesystem::path checkpoint = checkpoint_path(o.folder, at.step);
  check(std::filesystem::is_directory(checkpoint), "rank ", o.group.ranks().rank, " does not see ",
        checkpoint.string(),
        ": with --shard every process reads its part of a checkpoint; give --out a folder that all "
        "machines share");
  load_checkpoint(checkpoint, optimizer);
}

// Waits for the weights of each layer.
static std::function<void(size_t)> waiting_for(Shards& shards, const Optimizer& o, size_t layers) {
  std::vector<size_t> needed(layers + 1, o.parameters.size());  // that many parameters
  for (size_t i = o.parameters.size(); i-- > 0;)
    for (size_t l = 0; l < layers; ++l)
      if (o.parameters[i].layer > int64_t(l)) needed[l] = std::min(needed[l], i);
  return [&shards, needed](size_t layer) { shards.wait_weights(needed[layer]); };
}

Session open_session(Opening o) {
  const at::Device device = device_of(o.s, o.group.ranks());
  const Context context = context_of(o.group.ranks(), o.s.context_parallel);
  const Share share = share_of(o.s, context);
  use_own_stream(device);
  begin_peak(device);
  nn::Model model = o.checkpoint ? nn::load_model(*o.checkpoint) : start_model(o.s);
  check_model(o.s, model.config);
  check_travels(o.group, o.s, model.config, device);
  std::unique_ptr<Shards> shards;
  Optimizer optimizer = own_optimizer(o, model, device, shards);
  Position at = o.checkpoint ? load_checkpoint(*o.checkpoint, optimizer) : Position();
  share_start(o, optimizer, shards != nullptr, at);
  std::vector<at::Tensor> parameters;
  for (const Parameter& p : optimizer.parameters) parameters.push_back(p.at);
  // Before the tensors of a step: a length that the data does not have is an error, not a failed
  // allocation; and the validation of step 250 must not be what reports it.
  Batch first;
  if (o.group.ranks().local_rank == 0) o.source.check_tokens(model.config.V);
  if (at.step < o.s.steps) first = batch_of(o.s, o.source, context, model.config.V, at.step);
  std::vector<int64_t> lengths = evaluated_lengths(o.s);
  lengths.push_back(o.s.length);
  for (const int64_t T : lengths)
    if (o.s.evaluate_sequences > 0)
      make_batch(o.source, Split::validation, 0, 1, 1, T, model.config.V);
  const Group alone;
  GradientAverage average(shards ? alone : o.group, parameters);
  StepNumbers numbers = step_numbers(optimizer);
  const at::Tensor tokens =
      at::zeros({share.all / share.micro_batch, share.micro_batch, o.s.length / context.parts},
                at::TensorOptions(device).dtype(at::kLong));
  nn::Run run;
  run.execution = o.s.execution;
  run.compute = o.s.dtype == "float32" ? at::kFloat : at::kBFloat16;
  run.recompute = o.s.recompute;
  std::unique_ptr<attn::Split> split;
  if (context.parts > 1) split = std::make_unique<attn::Split>(make_split(o.group, context));
  run.split = split.get();
  if (shards) run.before_weights = waiting_for(*shards, optimizer, model.layers.size());
  return {o.s,
          o.source,
          device,
          std::move(o.group),
          context,
          std::move(split),
          std::move(model),
          run,
          optimizer,
          std::move(average),
          std::move(shards),
          at,
          numbers,
          tokens,
          at::zeros_like(tokens),
          at::zeros({tokens.size(0)}, numbers.loss.options()),
          nullptr,
          std::move(first)};
}

}  // namespace horner::train

// horner plan --train: what a training step takes of each GPU, and what it sends.
#include "cli/plan_train.h"

#include "cli/run.h"
#include "cli/table.h"
#include "core/check.h"
#include "nn/config.h"
#include "train/context.h"
#include "train/scale.h"
#include "train/settings.h"
#include "train/start.h"

namespace horner::cli {

static constexpr double kGB = 1e9, kMB = 1e6;

void add_training_options(CLI::App& app, TrainingPlan& o) {
  choices(option(app, "--model", o.model, "MODEL",
                 "a folder, for what decoding keeps; with --train: preset or config.json [tiny]"),
          {nn::preset_names()});
  choices(option(app, "--attention", o.attention, "NAME",
                 "with --train: variant or pattern of layers [the model's own]"),
          variant_choices());
  option(app, "--gpus", o.gpus, "N", "with --train: processes, one per GPU [1]")
      ->check(within(1, train::kMostRanks));
  positive(app, "--length", o.length, "N", "with --train: tokens per sequence [512]");
  positive(app, "--micro-batches", o.micro_batches, "N",
           "with --train: micro-batches of --batch sequences per step and GPU [1]");
  positive(app, "--context-parallel", o.context, "N",
           "with --train: GPUs that share each sequence [1]");
  choices(option(app, "--shard", o.shard, "NAME",
                 "with --train: what the GPUs divide among them: nothing, the optimizer, or "
                 "gradients too [none]"),
          {{"none", "optimizer", "gradients"}});
  app.add_flag("--recompute", o.recompute, "with --train: recompute activations");
  option(app, "--bucket", o.bucket, "MB", "with --train: as in 'horner train' [25]");
  option(app, "--memory", o.memory, "GB", "with --train: memory of a GPU [141]");
  option(app, "--bandwidth", o.bandwidths, "GB/s",
         "with --train: what a GPU sends per second; several may be given [12.5, 50, 450]");
}

// The settings of such a run; what training refuses, this refuses as well.
static train::Settings settings_of(const TrainingPlan& o) {
  horner::check(o.memory > 0, "--memory must be greater than 0, not ", o.memory);
  for (const double x : o.bandwidths)
    horner::check(x > 0, "--bandwidth must be greater than 0, not ", x);
  const train::Context context =
      train::context_of({.world = int(o.gpus), .local_world = int(o.gpus)}, o.context);
  const double all = double(o.batch) * double(o.micro_batches) * double(context.groups);
  horner::check(all <= 0x1p53, "a step of ", all, " sequences is more than can be counted; choose ",
                "a smaller --batch, --micro-batches or --gpus");
  train::Settings s;
  s.model = o.model, s.attention = o.attention, s.shard = o.shard, s.bucket = o.bucket;
  s.batch = o.batch * o.micro_batches * context.groups, s.micro_batch = o.batch;
  s.length = o.length, s.context_parallel = o.context;
  check_settings(s);
  share_of(s, context);
  return s;
}

static train::Layout layout_of(const TrainingPlan& o) {
  return {.processes = o.gpus,
          .context = o.context,
          .sequences = o.batch,
          .parts = o.micro_batches,
          .length = o.length,
          .shard = o.shard,
          .recompute = o.recompute,
          .bfloat16 = o.bfloat16,
          .bucket = o.bucket * kMB};
}

// What the GPUs of a sequence send each other, for all layers.
static std::string travelling(const nn::ModelConfig& c, const train::Layout& l) {
  if (l.context == 1) return "";
  const auto is = [&](attn::Travels what) {
    return std::ranges::any_of(c.layers, [&](const nn::LayerConfig& layer) {
      return std::ranges::any_of(layer.parts,
                                 [&](const nn::Part& part) { return travels(part, c, l) == what; });
    });
  };
  std::string out;
  const auto add = [&](const char* word) { out += (out.empty() ? "" : ", ") + std::string(word); };
  if (is(attn::Travels::states)) add("states");
  if (is(attn::Travels::blocks_of_keys)) add("keys and values, in a ring");
  if (is(attn::Travels::all_keys)) add("keys and values, gathered");
  return out;
}

namespace {

struct PlannedTraining {
  train::Memory memory;
  train::Traffic traffic;
  int64_t largest;           // micro-batch
  double parameters, flops;  // of a step
  std::vector<double> bandwidths;
  std::string along;  // what travels along the sequence
};

PlannedTraining planned(const TrainingPlan& o) {
  const train::Settings s = settings_of(o);
  const nn::ModelConfig config = train::start_config(s);
  check_model(s, config);
  const train::Layout layout = layout_of(o);
  const double tokens = double(o.batch * o.micro_batches) * double(o.length / o.context);
  return {.memory = memory_of(config, layout),
          .traffic = traffic_of(config, layout),
          .largest = largest_batch(config, layout, o.memory * kGB),
          .parameters = train::parameters_of(config),
          .flops = tokens * flops_per_token(config, layout),
          .bandwidths = o.bandwidths.empty() ? std::vector{12.5, 50., 450.} : o.bandwidths,
          .along = travelling(config, layout)};
}

Json json_of(const TrainingPlan& o, const PlannedTraining& p) {
  const auto& [m, t, largest, parameters, flops, bandwidths, along] = p;
  Json times = Json::array();
  for (const double x : bandwidths)
    times.push_back({{"gigabytes_per_second", x}, {"seconds", t.all() / (x * kGB)}});
  return {{"model", o.model},
          {"parameters", parameters},
          {"gpus", o.gpus},
          {"bytes",
           {{"weights", m.weights},
            {"gradients", m.gradients},
            {"optimizer", m.optimizer},
            {"activations", m.activations},
            {"loss", m.loss},
            {"buffers", m.buffers},
            {"all", m.all()}}},
          {"largest_batch", largest},
          {"sent_bytes",
           {{"gradients", t.gradients},
            {"weights", t.weights},
            {"sequence", t.sequence},
            {"numbers", t.numbers},
            {"all", t.all()}}},
          {"along_the_sequence", along},
          {"times", times},
          {"flop_per_step", flops}};
}

}  // namespace

Outcome plan_training(const TrainingPlan& o) {
  const PlannedTraining p = planned(o);
  if (o.json) return print_json(json_of(o, p));
  const auto& [m, t, largest, parameters, flops, bandwidths, along] = p;
  std::cout << bold(o.model) << "  " << count_text(parameters) << " parameters, " << o.gpus
            << (o.gpus == 1 ? " GPU, " : " GPUs, ") << o.batch << " × "
            << count_text(double(o.length)) << " tokens in a micro-batch"
            << (o.context > 1 ? " of " + std::to_string(o.context) + " GPUs" : "") << "\n\n";
  Table memory{.head = {"memory of a GPU", ""}, .right = {1}, .indent = 2};
  memory.rows = {{"weights", size_text(m.weights)},
                 {"gradients", size_text(m.gradients)},
                 {"optimizer", size_text(m.optimizer)},
                 {"activations", size_text(m.activations)},
                 {"loss", size_text(m.loss)},
                 {"buffers", size_text(m.buffers)},
                 {"all", size_text(m.all())}};
  std::cout << text(memory) << "\n";
  const std::string room = formatted("%g GB", o.memory);
  if (largest == 0)
    std::cout << "  " << red("too large") << ": not even one sequence fits into " << room << "\n";
  else
    std::cout << "  largest micro-batch in " << room << ": " << count_text(double(largest))
              << (largest == 1 ? " sequence\n" : " sequences\n");
  Table sent{.head = {"sent by a GPU in a step", ""}, .right = {1}, .indent = 2};
  sent.rows = {{"gradients", size_text(t.gradients)},
               {"weights", size_text(t.weights)},
               {"along the sequence" + (along.empty() ? "" : ": " + along), size_text(t.sequence)},
               {"all", size_text(t.all())}};
  std::cout << "\n" << text(sent) << "\n";
  for (const double x : bandwidths)
    std::cout << "  at " << formatted("%g GB/s", x) << ": "
              << formatted("%.3g ms", 1e3 * t.all() / (x * kGB)) << "\n";
  std::cout << "  a GPU computes " << formatted("%.3g TFLOP", flops / 1e12) << " in a step\n";
  return Outcome::fine;
}

}  // namespace horner::cli

#include "train/settings.h"

#include <algorithm>

#include "core/check.h"
#include "core/names.h"

namespace horner::train {

using S = Settings;

// clang-format off
static const Setting kSettings[] = {
    {"model",              &S::model,              true,  "a preset, a Hugging Face folder to go on from, or a config.json to begin from"},
    {"attention",          &S::attention,          true,  "the variant of every layer; empty: the model's own"},
    {"model-config",       &S::model_config,       true,  "fields of config.json to set, as JSON"},
    {"task",               &S::task,               true,  "what to learn"},
    {"data",               &S::data,               true,  "a file of tokens ('horner data pack' makes them); empty: the Python sources of torch, as bytes"},
    {"steps",              &S::steps,              false, "steps of training"},
    {"batch",              &S::batch,              true,  "sequences in a step, over all processes"},
    {"length",             &S::length,             true,  "tokens in a sequence"},
    {"at-once",            &S::at_once,            true,  "sequences that a process takes at once; gradients add up over the parts of a step; 0: all"},
    {"learning-rate",      &S::learning_rate,      true,  "the highest"},
    {"warmup",             &S::warmup,             true,  "steps in which it climbs there; -1: a tenth of all, at most 1,000"},
    {"decay-steps",        &S::decay_steps,        true,  "the step at which it would be 0; 0: the last"},
    {"beta1",              &S::beta1,              true,  "AdamW's mean of gradients"},
    {"beta2",              &S::beta2,              true,  "AdamW's mean of their squares"},
    {"eps",                &S::eps,                true,  "AdamW's"},
    {"weight-decay",       &S::weight_decay,       true,  "of matrices; norms and biases have none"},
    {"clip",               &S::clip,               true,  "the longest gradient; 0: any"},
    {"seed",               &S::seed,               true,  "of the weights and of the order of the data"},
    {"dtype",              &S::dtype,              true,  "float32, or bfloat16 for products beside float32 weights"},
    {"execution",          &S::execution,          true,  "of attention"},
    {"device",             &S::device,             false, "cpu, cuda, or auto: a GPU where there is one"},
    {"backend",            &S::backend,            false, "between processes: gloo, nccl, or auto"},
    {"graph",              &S::graph,              false, "on a GPU: capture the whole step as a CUDA graph"},
    {"threads",            &S::threads,            false, "of the CPU; 0: as torch has it"},
    {"evaluate-every",     &S::evaluate_every,     false, "steps between validations; 0: only at the end"},
    {"evaluate-sequences", &S::evaluate_sequences, false, "sequences of a validation"},
    {"checkpoint-every",   &S::checkpoint_every,   false, "steps between checkpoints; 0: only at the end"},
    {"keep",               &S::keep,               false, "how many checkpoints to keep"},
    {"entropy-every",      &S::entropy_every,      false, "steps between measurements of entropy and separability in each layer; 0: never"},
    {"on-spike",           &S::on_spike,           true,  "when the loss or the gradient jumps: note it, skip the step, or stop"},
    {"on-nan",             &S::on_nan,             true,  "when they are no numbers: skip the step, or stop"},
    {"spike",              &S::spike,              true,  "standard deviations that make a jump"},
    {"tensorboard",        &S::tensorboard,        false, "write event files for TensorBoard too"},
};
// clang-format on

std::span<const Setting> setting_table() {
  return kSettings;
}

Json to_json(const Settings& s) {
  Json out;
  for (const Setting& row : kSettings) std::visit([&](auto at) { out[row.name] = s.*at; }, row.at);
  return out;
}

static const char* kind(const Setting& row) {
  static const char* const kKinds[] = {"a text",   "a whole number", "a whole number from 0 on",
                                       "a number", "true or false",  "an object"};
  return kKinds[row.at.index()];
}

static bool suits(const Setting& row, const Json& j) {
  switch (row.at.index()) {
      // clang-format off
    case 0: return j.is_string();
    case 1: return j.is_number_integer();
    case 2: return j.is_number_unsigned() || (j.is_number_integer() && j.get<int64_t>() >= 0);
    case 3: return j.is_number();
    case 4: return j.is_boolean();
    default: return j.is_object();
      // clang-format on
  }
}

void read_settings(Settings& s, const Json& j, const std::string& where) {
  check(j.is_object(), where, " must hold a JSON object of settings");
  std::vector<std::string> names;
  for (const Setting& row : kSettings) names.push_back(row.name);
  for (const auto& [name, value] : j.items()) {
    const auto row = std::find(names.begin(), names.end(), name);
    check(row != names.end(), where, ": no setting '", name, "'; did you mean ",
          quoted(nearest(name, names)), "?");
    const Setting& setting = kSettings[row - names.begin()];
    check(suits(setting, value), where, ": '", name, "' must be ", kind(setting), ", not ",
          value.dump());
    std::visit([&](auto at) { value.get_to(s.*at); }, setting.at);
  }
}

void check_settings(const Settings& s) {
  const auto one_of = [](const char* name, const std::string& x,
                         const std::vector<std::string>& all) {
    check(std::find(all.begin(), all.end(), x) != all.end(), "no ", name, " '", x,
          "'; possible: ", quoted(all));
  };
  one_of("dtype", s.dtype, {"float32", "bfloat16"});
  one_of("device", s.device, {"auto", "cpu", "cuda"});
  one_of("backend", s.backend, {"auto", "gloo", "nccl"});
  one_of("on-spike", s.on_spike, {"note", "skip", "stop"});
  one_of("on-nan", s.on_nan, {"skip", "stop"});
  const auto least = [](const char* name, auto x, auto wanted) {
    check(x >= wanted, "'", name, "' must be at least ", wanted, ", not ", x);
  };
  for (const auto& [name, x] :
       {std::pair{"steps", s.steps}, {"batch", s.batch}, {"length", s.length}, {"keep", s.keep}})
    least(name, x, int64_t(1));
  for (const auto& [name, x] : {std::pair{"at-once", s.at_once},

                                {"decay-steps", s.decay_steps},
                                {"evaluate-every", s.evaluate_every},
                                {"evaluate-sequences", s.evaluate_sequences},
                                {"checkpoint-every", s.checkpoint_every},
                                {"entropy-every", s.entropy_every},
                                {"threads", s.threads}})
    least(name, x, int64_t(0));
  least("warmup", s.warmup, int64_t(-1));
  for (const auto& [name, x] : {std::pair{"learning-rate", s.learning_rate},
                                {"eps", s.eps},
                                {"weight-decay", s.weight_decay},
                                {"clip", s.clip}})
    least(name, x, 0.0);
  for (const auto& [name, x] : {std::pair{"beta1", s.beta1}, {"beta2", s.beta2}})
    check(x >= 0 && x < 1, "'", name, "' must be from 0 to below 1, not ", x);
  check(s.spike > 0, "'spike' must be above 0, not ", s.spike);
}

double learning_rate(const Settings& s, int64_t step) {
  const int64_t end = s.decay_steps > 0 ? s.decay_steps : s.steps;
  const int64_t up = s.warmup >= 0 ? s.warmup : std::min<int64_t>(1000, end / 10);
  if (step < up) return s.learning_rate * double(step + 1) / double(up);
  if (step >= end) return 0;
  return s.learning_rate * double(end - step) / double(std::max<int64_t>(1, end - up));
}

}  // namespace horner::train

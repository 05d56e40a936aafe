#include "train/settings.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "core/check.h"
#include "core/names.h"
#include "nn/pattern.h"

namespace horner::train {

using S = Settings;
using enum Change;

template <class... Names>
static Range one_of(Names... names) {
  return {.choices = {names...}};
}

static constexpr int kMostThreads = 1024;  // thousands of stacks exhaust the address space

// clang-format off
static const Setting kSettings[] = {
    {"model",              &S::model,              never,    {},                  "model preset, Hugging Face folder to continue from, or config.json to initialize from"},
    {"attention",          &S::attention,          never,    {},                  "attention variant, or a pattern of layers such as linear_decay*3,softmax; empty: the model's own"},
    {"model-config",       &S::model_config,       never,    {},                  "fields of config.json to override, as JSON"},
    {"task",               &S::task,               never,    {},                  "task to train on"},
    {"data",               &S::data,               never,    {},                  "token file made by 'horner data pack'; empty: the Python sources of torch, as bytes"},
    {"validation",         &S::validation,         never,    {},                  "token file for validation; empty: parts of the data are held out"},
    {"steps",              &S::steps,              schedule, {.least = 1},        "number of training steps"},
    {"batch",              &S::batch,              never,    {.least = 1},        "sequences per step, over all processes"},
    {"length",             &S::length,             never,    {.least = 1},        "tokens per sequence"},
    {"micro-batch",        &S::micro_batch,        never,    {.least = 0},        "sequences per forward pass of a process; gradients accumulate over a step; 0: all"},
    {"learning-rate",      &S::learning_rate,      never,    {.least = 0},        "peak learning rate"},
    {"warmup",             &S::warmup,             never,    {.least = -1},       "steps of linear warmup; -1: a tenth of all steps, at most 1,000"},
    {"decay-steps",        &S::decay_steps,        never,    {.least = 0},        "step at which the learning rate reaches 0; 0: the last step"},
    {"beta1",              &S::beta1,              never,    {0, 1},              "AdamW: decay of the mean gradient"},
    {"beta2",              &S::beta2,              never,    {0, 1},              "AdamW: decay of the mean squared gradient"},
    {"eps",                &S::eps,                never,    {.least = 0},        "AdamW: term added to the denominator"},
    {"weight-decay",       &S::weight_decay,       never,    {.least = 0},        "weight decay of matrices; norms and biases have none"},
    {"decay-all",          &S::decay_all,          never,    {},                  "apply weight decay to norms, biases and all other vectors too"},
    {"clip",               &S::clip,               never,    {.least = 0},        "maximum gradient norm; 0 disables clipping"},
    {"seed",               &S::seed,               never,    {},                  "seed of the initial weights and of the order of the data"},
    {"dtype",              &S::dtype,              never,    one_of("float32", "bfloat16"),      "dtype of matrix products; weights are float32"},
    {"execution",          &S::execution,          never,    {},                  "execution of attention, as 'horner list' names them"},
    {"device",             &S::device,             always,   one_of("auto", "cpu", "cuda"),      "auto: a GPU if there is one"},
    {"backend",            &S::backend,            always,   one_of("auto", "gloo", "nccl"),     "communication between processes"},
    {"shard",              &S::shard,              always,   one_of("none", "optimizer", "gradients"),  "what the processes divide among them: nothing, the optimizer, or gradients too"},
    {"bucket",             &S::bucket,             always,   {.least = 0, .below = 1e9, .open = true}, "with --shard: gradients and weights sent together, in MB"},
    {"context-parallel",   &S::context_parallel,   always,   {.least = 1},        "processes that share each sequence; its length is divided among them"},
    {"recompute",          &S::recompute,          always,   {},                  "keep only the rows between layers for the backward pass, and compute the rest again"},
    {"graph",              &S::graph,              always,   {},                  "on a GPU, capture the whole step as a CUDA graph"},
    {"threads",            &S::threads,            always,   {0, kMostThreads + 1},  "CPU threads; 0: torch's default"},
    {"evaluate-every",     &S::evaluate_every,     always,   {.least = 0},        "steps between validations; 0: only at the end"},
    {"evaluate-sequences", &S::evaluate_sequences, always,   {.least = 0},        "sequences per validation; 0 disables validation"},
    {"evaluate-lengths",   &S::evaluate_lengths,   always,   {},                  "lengths of sequences at which the finished model is validated as well, such as 64,128,256"},
    {"checkpoint-every",   &S::checkpoint_every,   always,   {.least = 0},        "steps between checkpoints; 0: only at the end"},
    {"keep",               &S::keep,               always,   {.least = 1},        "number of checkpoints to keep"},
    {"entropy-every",      &S::entropy_every,      always,   {.least = 0},        "steps between measurements of each layer's entropy and separability; 0: never"},
    {"on-spike",           &S::on_spike,           always,   one_of("note", "skip", "stop"),     "when the loss or gradient norm spikes: note it, skip the step, or stop"},
    {"on-nan",             &S::on_nan,             always,   one_of("skip", "stop"),             "when the loss or gradient is NaN or infinite: skip the step, or stop"},
    {"spike",              &S::spike,              never,    {.least = 0, .open = true},         "standard deviations above the mean that count as a spike"},
    {"tensorboard",        &S::tensorboard,        always,   {},                  "also write TensorBoard event files"},
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

const char* kind(const Setting& row) {
  static const char* const kKinds[] = {"a string", "an integer",    "a non-negative integer",
                                       "a number", "true or false", "a JSON object"};
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
  check(j.is_object(), where, " must be a JSON object of settings");
  std::vector<std::string> names;
  for (const Setting& row : kSettings) names.push_back(row.name);
  for (const auto& [given, x] : j.items()) {
    const std::string name = given == "at-once" ? "micro-batch" : given;  // older runs
    const bool layers = name == "attention" && x.is_array();
    const Json value = layers ? Json(nn::pattern_text(nn::pattern(x))) : x;
    const auto row = std::find(names.begin(), names.end(), name);
    check(row != names.end(), where, ": no setting '", name, "'; did you mean ",
          quoted(nearest(name, names)), "?");
    const Setting& setting = kSettings[row - names.begin()];
    check(suits(setting, value), where, ": '", name, "' must be ", kind(setting), ", not ",
          value.dump());
    std::visit([&](auto at) { value.get_to(s.*at); }, setting.at);
  }
}

std::string range_text(const Range& r) {
  const auto text = [](double x) { return Json(int64_t(x)).dump(); };
  if (!r.choices.empty()) return quoted(r.choices);
  if (!std::isfinite(r.least)) return "";
  return (r.open ? "greater than " : "at least ") + text(r.least) +
         (std::isfinite(r.below) ? " and below " + text(r.below) : "");
}

static bool contains(const Range& r, const Json& x) {
  if (!r.choices.empty())
    return std::find(r.choices.begin(), r.choices.end(), x.get<std::string>()) != r.choices.end();
  if (!x.is_number()) return true;
  const double value = x;
  return (r.open ? value > r.least : value >= r.least) && value < r.below;
}

std::vector<int64_t> evaluated_lengths(const Settings& s) {
  constexpr int64_t kMost = 1 << 24;
  std::set<int64_t> out;
  const std::string& text = s.evaluate_lengths;
  for (size_t at = 0; at < text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    int64_t n = 0;
    const auto [end, error] = std::from_chars(text.data() + at, text.data() + comma, n);
    check(error == std::errc() && end == text.data() + comma && n > 0 && n <= kMost &&
              comma + 1 != text.size(),
          "'evaluate-lengths' must be lengths such as 64,128,256, not '", text, "'");
    out.insert(n);
    at = comma + 1;
  }
  return {out.begin(), out.end()};
}

void check_settings(const Settings& s) {
  evaluated_lengths(s);
  const Json all = to_json(s);
  for (const Setting& row : kSettings)
    check(contains(row.range, all[row.name]), "'", row.name, "' must be ", range_text(row.range),
          ", not ", all[row.name].dump());
}

double learning_rate(const Settings& s, int64_t step) {
  const int64_t end = s.decay_steps > 0 ? s.decay_steps : s.steps;
  const int64_t up = s.warmup >= 0 ? s.warmup : std::min<int64_t>(1000, end / 10);
  if (step < up) return s.learning_rate * double(step + 1) / double(up);
  if (step >= end) return 0;
  return s.learning_rate * double(end - step) / double(std::max<int64_t>(1, end - up));
}

}  // namespace horner::train

#include "convert/measure.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>

#include "attn/stages.h"
#include "convert/swap.h"
#include "core/check.h"
#include "core/random.h"
#include "diag/series.h"
#include "files/json.h"
#include "nn/rows.h"

namespace horner::convert {

// clang-format off
static const Measure kMeasures[] = {
    {"order",     "order of the centred series that its output needs", &HeadMeasures::order},
    {"entropy",   "entropy of its weights, as a share of the largest", &HeadMeasures::entropy},
    {"distance",  "mean distance of what it attends to",               &HeadMeasures::distance},
    {"retrieval", "loss on repeated tokens without it",                &HeadMeasures::retrieval},
    {"kl",        "change of the predictions without its far keys",    &HeadMeasures::kl},
};
// clang-format on

std::span<const Measure> measure_table() {
  return kMeasures;
}

std::string best_form(const HeadMeasures& h) {
  return std::ranges::min_element(h.errors, {}, [](const auto& e) { return e.second; })->first;
}

double cheapest(const HeadMeasures& h) {
  double least = INFINITY;
  for (const auto& [form, cost] : h.costs) least = std::min(least, cost);
  return least;
}

Json to_json(const Measures& m) {
  Json heads = Json::array();
  for (const HeadMeasures& h : m.heads) {
    Json& j = heads.emplace_back(Json{{"layer", h.layer}, {"head", h.head}});
    for (const Measure& each : kMeasures) j[each.name] = h.*each.at;
    j["errors"] = h.errors, j["costs"] = h.costs;
  }
  return {{"loss", m.loss}, {"done", m.done}, {"heads", heads}};
}

Measures read_measures(const Json& j) {
  Measures m{j.at("loss"), {}, j.at("done")};
  for (const Json& x : j.at("heads")) {
    HeadMeasures& h = m.heads.emplace_back(HeadMeasures{x.at("layer"), x.at("head")});
    for (const Measure& each : kMeasures) h.*each.at = x.at(each.name).get<double>();
    h.errors = x.at("errors").get<std::map<std::string, double>>();
    h.costs = x.at("costs").get<std::map<std::string, double>>();
  }
  return m;
}

static std::filesystem::path file_of(const Task& t) {
  return t.folder / "measures.json";
}

at::Tensor repeated_tokens(const Task& t, int64_t T) {
  const at::Tensor text = t.sequences(uint64_t(1) << 40, 1, T)[0].cpu();
  const at::Tensor out = at::empty({1, T}, at::kLong);
  auto* const x = out.data_ptr<int64_t>();
  const int64_t half = T / 2;
  for (int64_t i = 0; i < half; ++i)
    x[i] = text[int64_t(random_bits(t.s.seed, stream_of("repeated"), uint64_t(i)) % uint64_t(T))]
               .item<int64_t>();
  x[0] = text[0].item<int64_t>();
  for (int64_t i = half; i < T; ++i) x[i] = x[i - half];
  return out.to(t.teacher.embedding.device());
}

// Order, entropy and distance, from one pass.
static void look_at_rows(const Task& t, const at::Tensor& tokens, Measures& m) {
  constexpr double kError = 0.05;
  const c10::InferenceMode none;
  const std::vector<nn::Query> queries = nn::few_queries(tokens.size(1), 64);
  const nn::Probe probe{[&](const nn::Operated& o) {
    std::vector<HeadMeasures*> heads(o.part.heads.size(), nullptr);
    for (HeadMeasures& h : m.heads)
      if (const auto at = std::ranges::find(o.part.heads, h.head);
          h.layer == o.layer && at != o.part.heads.end())
        heads[size_t(at - o.part.heads.begin())] = &h;
    if (std::ranges::count(heads, nullptr) == int64_t(heads.size())) return;
    next(t.hooks, "rows of layer " + std::to_string(o.layer));
    const std::vector<diag::HeadSeries> series = diag::series(o.part.attention, o.in, queries);
    double weight = 0;
    nn::for_rows(o.part.attention, o.in, queries, [&](const nn::Rows& rows) {
      const int64_t R = rows.weights.size(1), S = rows.weights.size(2);
      const at::Tensor w = rows.weights.to(at::kDouble).cpu();
      std::vector<double> at_t, n;
      for (int64_t r = 0; r < R; ++r) {
        at_t.push_back(double(rows.queries[size_t(r)].t));
        n.push_back(double(std::max<int64_t>(2, rows.count[size_t(r)])));
      }
      const at::Tensor position = at::arange(S, at::kDouble);
      const at::Tensor far = (w * (at::tensor(at_t).unsqueeze(1) - position)).sum(-1).sum(-1);
      const at::Tensor spread = (-at::xlogy(w, w).sum(-1) / at::tensor(n).log()).sum(-1);
      for (size_t h = 0; h < heads.size(); ++h)
        if (heads[h]) {
          heads[h]->distance += far[int64_t(h)].item<double>();
          heads[h]->entropy += spread[int64_t(h)].item<double>();
        }
      weight += double(R);
    });
    for (size_t h = 0; h < heads.size(); ++h)
      if (heads[h]) {
        heads[h]->order = diag::enough(series[h].centred, kError);
        heads[h]->distance /= weight, heads[h]->entropy /= weight;
      }
  }};
  nn::Run run = t.run;
  run.probe = &probe;
  nn::hidden(t.teacher, tokens, run);
}

// One or two forward passes for each head.
static void look_at_heads(const Task& t, const at::Tensor& tokens, Measures& m) {
  const c10::InferenceMode none;
  const at::Tensor repeated = repeated_tokens(t, tokens.size(1));
  const int64_t from = tokens.size(1) / 2;
  const at::Tensor own = nn::hidden(t.teacher, tokens, t.run);
  const double base =
      effect_of(t.teacher, repeated, nn::hidden(t.teacher, repeated, t.run), {}, from).loss;
  m.loss = effect_of(t.teacher, tokens, own).loss;
  const nn::Model near =
      make_student(t.teacher, assign_all(t.teacher.config, "near", t.layers()), t.s.near, t.s.seed);
  for (; m.done < int64_t(m.heads.size()); ++m.done) {
    HeadMeasures& h = m.heads[size_t(m.done)];
    if (t.hooks.stop()) files::write_json(file_of(t), to_json(m));
    next(t.hooks, "head " + std::to_string(h.layer) + "." + std::to_string(h.head));
    const Swap away{nullptr, {{h.layer, h.head}}}, cut{&near, {{h.layer, h.head}}};
    const at::Tensor without = hidden_with(t.teacher, repeated, {&away, 1}, t.run);
    h.retrieval = effect_of(t.teacher, repeated, without, {}, from).loss - base;
    h.kl = effect_of(t.teacher, tokens, hidden_with(t.teacher, tokens, {&cut, 1}, t.run), own).kl;
  }
}

Measures measure(const Task& t) {
  Measures m;
  if (std::filesystem::exists(file_of(t))) m = read_measures(files::read_json(file_of(t)));
  const at::Tensor tokens = t.sequences(uint64_t(1) << 40, 1, t.s.measure_tokens);
  if (m.heads.empty()) {
    for (const int64_t i : t.layers())
      for (int64_t h = 0; h < t.teacher.config.H; ++h) m.heads.push_back({i, h});
    look_at_rows(t, tokens, m);
    files::write_json(file_of(t), to_json(m));
  }
  if (m.done < int64_t(m.heads.size())) {
    look_at_heads(t, tokens, m);
    files::write_json(file_of(t), to_json(m));
  }
  return m;
}

std::map<std::string, nn::Model> trials(const Task& t) {
  std::map<std::string, nn::Model> out;
  for (const std::string& form : t.s.forms) {
    nn::Model student =
        make_student(t.teacher, assign_all(t.teacher.config, form, t.layers()), t.s.near, t.s.seed);
    transfer(t, student, t.s.trial_steps, t.folder / ("trial-" + form + ".safetensors"),
             "trial of " + form);
    for (Tuned& x : own_weights(student)) x.at.set_requires_grad(false);
    out.emplace(form, std::move(student));
  }
  return out;
}

void measure_trials(const Task& t, const std::map<std::string, nn::Model>& students, Measures& m) {
  const c10::InferenceMode none;
  const at::Tensor tokens = t.sequences(uint64_t(1) << 41, 1, t.s.measure_tokens);
  double base = NAN;
  for (const auto& [form, student] : students) {
    if (m.heads[0].errors.contains(form) && (!t.s.costs || m.heads.back().costs.contains(form)))
      continue;
    next(t.hooks, "errors of " + form);
    const auto errors = output_errors(t.teacher, student, tokens, t.run);
    for (HeadMeasures& h : m.heads) h.errors[form] = errors[size_t(h.layer)][size_t(h.head)];
    if (!t.s.costs) continue;
    if (std::isnan(base))
      base = effect_of(t.teacher, tokens, nn::hidden(t.teacher, tokens, t.run)).loss;
    for (HeadMeasures& h : m.heads) {
      if (h.costs.contains(form)) continue;
      if (t.hooks.stop()) files::write_json(file_of(t), to_json(m));
      next(t.hooks, form + " in head " + std::to_string(h.layer) + "." + std::to_string(h.head));
      const Swap swap{&student, {{h.layer, h.head}}};
      const at::Tensor x = hidden_with(t.teacher, tokens, {&swap, 1}, t.run);
      h.costs[form] = effect_of(t.teacher, tokens, x).loss - base;
    }
  }
  files::write_json(file_of(t), to_json(m));
}

}  // namespace horner::convert

#include "convert/convert.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "convert/heal.h"
#include "convert/swap.h"
#include "core/random.h"
#include "diag/statistics.h"
#include "files/json.h"

namespace horner::convert {

// Ranks from 0, equal values share their mean.
static std::vector<double> ranks(const std::vector<double>& x) {
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](size_t i) { return x[i]; });
  std::vector<double> out(x.size());
  for (size_t i = 0; i < order.size();) {
    size_t n = 1;
    while (i + n < order.size() && x[order[i + n]] == x[order[i]]) ++n;
    for (size_t k = 0; k < n; ++k) out[order[i + k]] = double(i) + double(n - 1) / 2;
    i += n;
  }
  return out;
}

static double spearman(const std::vector<double>& a, const std::vector<double>& b) {
  diag::Line line;
  const std::vector<double> x = ranks(a), y = ranks(b);
  for (size_t i = 0; i < x.size(); ++i) line.add(x[i], y[i]);
  const double sign = line.slope() < 0 ? -1 : 1;
  return sign * std::sqrt(std::max(0., line.r2()));
}

std::vector<Correlation> correlations(const Measures& m, uint64_t seed) {
  constexpr int kSamples = 2000;
  std::vector<double> cost;
  for (const HeadMeasures& h : m.heads) cost.push_back(cheapest(h));
  std::vector<Correlation> out;
  if (cost.size() < 3 || !std::isfinite(cost[0])) return out;
  for (const Measure& each : measure_table()) {
    std::vector<double> value, drawn;
    for (const HeadMeasures& h : m.heads) value.push_back(h.*each.at);
    for (int s = 0; s < kSamples; ++s) {
      std::vector<double> a, b;
      for (size_t i = 0; i < cost.size(); ++i) {
        const size_t pick =
            random_bits(seed, stream_of("bootstrap"), uint64_t(s) * cost.size() + i) % cost.size();
        a.push_back(value[pick]), b.push_back(cost[pick]);
      }
      if (const double rho = spearman(a, b); std::isfinite(rho)) drawn.push_back(rho);
    }
    out.push_back({each.name, spearman(value, cost), diag::quantile(drawn, 0.025),
                   diag::quantile(drawn, 0.975)});
  }
  return out;
}

static std::vector<Kept> kept_curves(const Task& t, const Measures& m,
                                     const std::map<std::string, nn::Model>& students) {
  std::vector<std::string> by;
  for (const Measure& each : measure_table()) by.push_back(each.name);
  for (const char* other : {"cost", "uniform", "random"}) by.push_back(other);
  // What chooses heads and forms has seen text of training only.
  const at::Tensor tokens = t.sequences(0, 1, t.s.measure_tokens, train::Split::validation);
  std::vector<Kept> out;
  const size_t all = m.heads.size();
  for (const std::string& name : by) {
    Kept curve{name, {}};
    const std::vector<size_t> order = ranked(m, name, t.s.seed);
    for (const size_t keep : {size_t(0), all / 8, all / 4, all / 2}) {
      if (!curve.losses.empty() && curve.losses.back().first == int64_t(keep)) continue;
      next(t.hooks, std::to_string(keep) + " heads kept by " + name);
      std::map<std::string, Heads> converted;
      for (size_t i = keep; i < all; ++i) {
        const HeadMeasures& h = m.heads[order[i]];
        converted[best_form(h)].emplace_back(h.layer, h.head);
      }
      std::vector<Swap> swaps;
      for (const auto& [form, heads] : converted) swaps.push_back({&students.at(form), heads});
      const at::Tensor x = hidden_with(t.teacher, tokens, swaps, t.run);
      curve.losses.emplace_back(int64_t(keep), effect_of(t.teacher, tokens, x).loss);
    }
    out.push_back(curve);
  }
  return out;
}

// Measures, trials and the plan; what is in files already is read.
static void plan_stage(const Task& t, Result& r) {
  if (t.s.costs)  // says now whether the text of kept_curves is there
    t.sequences(0, 1, t.s.measure_tokens, train::Split::validation);
  r.measures = measure(t);
  const std::map<std::string, nn::Model> students = trials(t);
  measure_trials(t, students, r.measures);
  if (t.s.costs) r.kept = kept_curves(t, r.measures, students);
  r.plan = make_plan(t.s, t.teacher, r.measures);
  files::write_json(t.folder / "plan.json", to_json(r.plan));
}

// The teacher without the heads that the plan converts: their columns of the output projection are
// 0.
static nn::Model without_heads(const nn::Model& teacher, const Assignment& forms) {
  nn::Model out = teacher;
  const int64_t D = teacher.config.D;
  for (size_t i = 0; i < forms.size(); ++i) {
    out.layers[i].o = out.layers[i].o.clone();
    for (int64_t h = 0; h < teacher.config.H; ++h)
      if (forms[i][size_t(h)] != kCache) out.layers[i].o.narrow(1, h * D, D).zero_();
  }
  return out;
}

// Models that learn from the same tokens with the same settings: the teacher itself and, on demand,
// what the converted heads do with a part of their form.
static std::vector<std::pair<std::string, nn::Model>> comparisons(const Task& t, Result& r) {
  std::vector<std::pair<std::string, nn::Model>> out;
  if (t.s.control) {
    nn::Model& tuned = out.emplace_back(kControl, t.teacher).second;
    r.control = heal(t, tuned, t.s.heal_steps, t.folder / "control.safetensors", "control");
  }
  if (!t.s.objections) return out;
  const Assignment planned = assignment_of(r.plan, t.teacher.config);
  for (const auto& [form, name] : {std::pair("near", kNear), {"state", kState}}) {
    Assignment forms = planned;
    for (auto& layer : forms)
      for (std::string& each : layer)
        if (each != kCache) each = form;
    nn::Model& m =
        out.emplace_back(name, make_student(t.teacher, forms, r.plan.near, t.s.seed)).second;
    const auto file = [&](const char* stage) {
      return t.folder / (std::string(stage) + "-" + form + ".safetensors");
    };
    transfer(t, m, t.s.transfer_steps, file("transfer"), std::string("transfer, ") + name);
    heal(t, m, t.s.heal_steps, file("heal"), std::string("heal, ") + name);
  }
  nn::Model& none = out.emplace_back(kNone, without_heads(t.teacher, planned)).second;
  heal(t, none, t.s.heal_steps, t.folder / "heal-none.safetensors", std::string("heal, ") + kNone);
  return out;
}

Result convert(const Task& t, const std::string& until, const std::optional<Plan>& given) {
  Result r{.settings = t.s};
  if (given) {
    r.plan = *given;
    const nn::ModelConfig c =
        converted_config(t.teacher.config, assignment_of(r.plan, t.teacher.config), r.plan.near);
    r.plan.bytes = kept_bytes(c, r.plan.tokens);
    r.plan.cache_bytes = kept_bytes(t.teacher.config, r.plan.tokens);
    files::write_json(t.folder / "plan.json", to_json(r.plan));
  } else if (until == "measure") {
    r.measures = measure(t);
    return r;
  } else {
    plan_stage(t, r);
  }
  if (until == "plan") return r;
  nn::Model student =
      make_student(t.teacher, assignment_of(r.plan, t.teacher.config), r.plan.near, t.s.seed);
  r.transfer =
      transfer(t, student, t.s.transfer_steps, t.folder / "transfer.safetensors", "transfer");
  const nn::Model transferred = student;
  std::vector<Candidate> models{{kTeacher, &t.teacher}, {kTransferred, &transferred}};
  std::vector<std::pair<std::string, nn::Model>> others;
  if (until == "heal") {
    r.heal = heal(t, student, t.s.heal_steps, t.folder / "heal.safetensors", "heal");
    models.push_back({kConverted, &student});
    others = comparisons(t, r);
    for (const auto& [name, model] : others) models.push_back({name, &model});
  }
  r.probes = probe(t, models);
  r.tokens = (t.s.transfer_steps + (until == "heal" ? t.s.heal_steps : 0)) * t.s.batch * t.s.length;
  r.model = student;
  return r;
}

Json to_json(const Result& r) {
  Json kept = Json::array(), correlated = Json::array();
  for (const Kept& k : r.kept) kept.push_back({{"by", k.by}, {"losses", k.losses}});
  for (const Correlation& c : correlations(r.measures, r.settings.seed))
    correlated.push_back(
        {{"measure", c.measure}, {"rho", c.rho}, {"low", c.low}, {"high", c.high}});
  return {{"settings", to_json(r.settings)}, {"tokens", r.tokens}, {"plan", to_json(r.plan)},
          {"probes", to_json(r.probes)},     {"kept", kept},       {"correlations", correlated},
          {"transfer", r.transfer},          {"heal", r.heal},     {"control", r.control}};
}

}  // namespace horner::convert

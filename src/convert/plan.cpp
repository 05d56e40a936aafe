#include "convert/plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/check.h"
#include "core/names.h"
#include "core/quantities.h"
#include "core/random.h"

namespace horner::convert {

Json to_json(const Plan& p) {
  Json heads = Json::array();
  for (const Choice& c : p.heads)
    heads.push_back({{"layer", c.layer}, {"head", c.head}, {"form", c.form}, {"why", c.why}});
  return {{"near", p.near},   {"tokens", p.tokens},           {"budget", p.budget},
          {"bytes", p.bytes}, {"cache_bytes", p.cache_bytes}, {"heads", heads}};
}

Plan read_plan(const Json& j, const nn::ModelConfig& teacher) {
  try {
    Plan p{j.at("near"), j.at("tokens"), j.value("budget", 0.), {}, 0, 0};
    for (const Json& x : j.at("heads"))
      p.heads.push_back({x.at("layer"), x.at("head"), x.at("form"), x.value("why", "")});
    for (const Choice& c : p.heads) {
      check(c.layer >= 0 && c.layer < int64_t(teacher.layers.size()) && c.head >= 0 &&
                c.head < teacher.H,
            "the plan has head ", c.layer, ".", c.head, ", but the model has ",
            teacher.layers.size(), " layers of ", teacher.H, " heads");
      form_text(teacher, size_t(c.layer), c.form, p.near);
    }
    return p;
  } catch (const Json::exception& e) {
    fail("the plan must have 'near', 'tokens' and 'heads', each with 'layer', 'head' and 'form'; ",
         files::problem_of(e));
  }
}

Assignment assignment_of(const Plan& p, const nn::ModelConfig& teacher) {
  Assignment out = assign_all(teacher, kCache, {});
  for (const Choice& c : p.heads) out[size_t(c.layer)][size_t(c.head)] = c.form;
  return out;
}

std::vector<size_t> ranked(const Measures& m, const std::string& by, uint64_t seed) {
  std::vector<double> value(m.heads.size());
  std::map<int64_t, double> in_layer;
  bool known = by == "cost" || by == "random" || by == "uniform";
  for (const Measure& each : measure_table()) known |= by == each.name;
  std::vector<std::string> names{"cost", "random", "uniform"};
  for (const Measure& each : measure_table()) names.push_back(each.name);
  check(known, "no measure '", by, "' of a head; possible: ", quoted(names));
  for (size_t i = 0; i < m.heads.size(); ++i) {
    const HeadMeasures& h = m.heads[i];
    if (by == "cost") value[i] = cheapest(h);
    if (by == "random") value[i] = double(random_bits(seed, stream_of("heads"), uint64_t(i)) >> 11);
    if (by == "uniform") value[i] = -in_layer[h.layer]++;  // the first head of every layer first
    for (const Measure& each : measure_table())
      if (by == each.name) value[i] = h.*each.at;
  }
  check(by != "cost" || m.heads[0].errors.empty() || std::isfinite(value[0]),
        "the cost of heads was not measured; add --costs");
  std::vector<size_t> order(m.heads.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return value[a] > value[b]; });
  return order;
}

namespace {

struct Planner {
  const Settings& s;
  const nn::Model& teacher;
  const Measures& m;
  Plan plan;

  double bytes() const {
    return kept_bytes(
        converted_config(teacher.config, assignment_of(plan, teacher.config), plan.near),
        plan.tokens);
  }
  // Of one head alone in its layer.
  double bytes_of(const HeadMeasures& h, const std::string& form) const {
    const std::string text = form_text(teacher.config, size_t(h.layer), form, plan.near);
    nn::Json j = teacher.config.json;
    j["horner_variant"] = text;
    const nn::ModelConfig c = nn::model_config(j);
    return kept_bytes(c, c.layers[size_t(h.layer)], plan.tokens);
  }

  void take_best() {
    for (const HeadMeasures& h : m.heads) {
      const std::string best = best_form(h);
      plan.heads.push_back({h.layer, h.head, best,
                            "least error in the trials, " + formatted("%.3g", h.errors.at(best))});
    }
  }
  // Whole layers change: heads that share keys share a state as well.
  void make_smaller() {
    while (plan.budget > 0 && bytes() > plan.budget) {
      double best = INFINITY;
      size_t which = 0;
      std::string to;
      for (size_t i = 0; i < plan.heads.size(); ++i) {
        const HeadMeasures& h = m.heads[i];
        const double now = bytes_of(h, plan.heads[i].form);
        for (const auto& [form, error] : h.errors) {
          const double saved = now - bytes_of(h, form);
          const double price = (error - h.errors.at(plan.heads[i].form)) / saved;
          if (saved > 0 && price < best) best = price, which = i, to = form;
        }
      }
      check(std::isfinite(best), "the smallest plan needs ", int64_t(bytes()), " bytes at ",
            plan.tokens, " tokens, more than the budget of ", int64_t(plan.budget),
            "; choose a smaller --near, forms with smaller states, or more --bytes");
      plan.heads[which].form = to;
      plan.heads[which].why =
          "fits the budget; error " + formatted("%.3g", m.heads[which].errors.at(to));
    }
  }
  void keep_caches() {
    int64_t kept = 0;
    for (const size_t i : ranked(m, s.by, s.seed)) {
      if (s.keep >= 0 && kept >= s.keep) break;
      const Choice before = plan.heads[i];
      plan.heads[i].form = kCache;
      plan.heads[i].why = "number " + std::to_string(kept + 1) + " by " + s.by;
      if (s.keep < 0 && bytes() > plan.budget)
        plan.heads[i] = before;
      else
        ++kept;
    }
  }
};

}  // namespace

Plan make_plan(const Settings& s, const nn::Model& teacher, const Measures& m) {
  Planner p{s, teacher, m, {s.near, s.tokens}};
  p.plan.cache_bytes = kept_bytes(teacher.config, s.tokens);
  if (s.keep < 0) p.plan.budget = s.bytes > 0 ? s.bytes : s.share * p.plan.cache_bytes;
  p.take_best(), p.make_smaller(), p.keep_caches();
  p.plan.bytes = p.bytes();
  return p.plan;
}

}  // namespace horner::convert

// The numbers of a diagnosis as JSON.
#include "diag/claims.h"
#include "diag/diag_report.h"

namespace horner::diag {

using nn::Json;

static Json head_json(const Diagnosis& d, const Head& h) {
  Json out = {{"layer", h.layer}, {"head", h.head}};
  for (const Metric& m : metrics()) out[m.name] = m.of(d, h);
  const size_t last = d.settings.lengths.size() - 1;
  for (const auto& [name, what] : {std::pair{"distance", &DistanceSums::distance},
                                   {"expected_A", &DistanceSums::expected},
                                   {"expected_B", &DistanceSums::permuted},
                                   {"bound", &DistanceSums::bound}}) {
    Json list = Json::array();
    for (const DistanceSums& s : h.distances[last]) list.push_back(s.*what / s.rows);
    out[name] = list;
  }
  out["separable"] = Json::array();
  for (int64_t N : d.separable) out["separable"].push_back(share_at(d, h, N));
  out["sensitivity"] = h.sensitivity.mean;
  out["sensitivity of the most sensitive row"] = h.sensitivity.most;
  out["scale"] = h.scale;
  out["sensitivity by raw products"] = h.raw_sensitivity.mean;
  out["sensitivity by raw products of the most sensitive row"] = h.raw_sensitivity.most;
  for (const Growth& g : h.growth)
    out["exponents, N in proportion"].push_back({{"distance", g.distance.slope()},
                                                 {"per_token_left_out", g.each.slope()},
                                                 {"expected_A", g.expected.slope()}});
  return out;
}

static Json interval_json(const Interval& x) {
  return {{"median", x.middle}, {"low", x.low}, {"high", x.high}};
}

// What claims.h sums up.
static void add_claims_json(const Diagnosis& d, Json& out) {
  for (const Coverage& c : d.coverage) {
    if (c.of == 0) continue;
    Json by = Json::array();
    for (size_t m = 0; m < c.selected.size(); ++m)
      by.push_back({{"selected", c.selected[m]}, {"covered", c.covered[m]}});
    out["coverage"].push_back({{"layer", c.layer},
                               {"N", c.N},
                               {"heads", c.heads()},
                               {"one_head", c.share()},
                               {"measured", c.measured()},
                               {"independent_heads", c.expected()},
                               {"paper", c.paper()},
                               {"by_heads", by}});
  }
  for (const Exponents& e : exponents(d))
    out["growth"]["fractions"].push_back({{"fraction", e.fraction},
                                          {"distance", interval_json(e.distance)},
                                          {"verdict", verdict(e.distance, d.heads.size())},
                                          {"per_token_left_out", interval_json(e.each)},
                                          {"expected_A", interval_json(e.expected)}});
  const LastToken last = last_token(d);
  out["growth"]["one_token_left_out"] = {{"distance", interval_json(last.distance)},
                                         {"per_token_left_out", interval_json(last.each)}};
  out["jacobians"] = Json::array();
  for (const JacobianSummary& s : jacobian_summaries(d))
    out["jacobians"].push_back({{"name", s.name},
                                {"norm", s.norm},
                                {"largest_norm", s.largest},
                                {"derived_bound", s.derived},
                                {"bound_with_min_F", s.least},
                                {"two_term_bound", s.two_terms},
                                {"attained", s.attained},
                                {"attained_largest", s.attained_largest}});
  for (const auto& [name, units] :
       {std::pair{"scores", &Head::sensitivity}, {"raw_products", &Head::raw_sensitivity}}) {
    std::vector<std::vector<double>> curves;
    for (size_t j = 0; j < d.settings.epsilons.size(); ++j) {
      curves.push_back(largest_over_heads(d, units, &Sensitivity::mean, j));
      out["one_over_T"][name]["from"].push_back(law_from(d.settings.temperatures, curves.back()));
    }
    out["one_over_T"][name]["all_epsilons_agree_from"] =
        agree_from(d.settings.temperatures, curves);
  }
}

static Json effects(const std::vector<Effect>& list) {
  Json out = Json::array();
  for (const Effect& e : list)
    out.push_back({{"name", e.name},
                   {"loss_all", e.all},
                   {"loss_half", e.half},
                   {"loss_saturated", e.saturated},
                   {"entropy_ratio", e.rows.entropy_ratio},
                   {"separable_5", e.rows.share},
                   {"sensitivity", e.rows.sensitivity}});
  return out;
}

Json to_json(const WhatIf& w) {
  Json out = {{"tokens", w.tokens},
              {"attention", w.attention},
              {"loss", w.loss},
              {"whole", w.whole},
              {"normalisers", effects(w.normalisers)},
              {"plain", effects(w.plain)},
              {"centred", effects(w.centred)}};
  for (const Truncated& t : w.truncated)
    out["top"].push_back({{"renormalised", t.renormalised},
                          {"within_1_percent", t.within_1},
                          {"within_5_percent", t.within_5},
                          {"losses", t.losses}});
  if (w.tops) {
    const Tops& t = *w.tops;
    Json& list = out["top_of_heads"] = Json::array();
    for (const HeadTop& h : t.heads)
      list.push_back({{"layer", h.layer},
                      {"head", h.head},
                      {"alone_1_percent", h.alone[0]},
                      {"alone_5_percent", h.alone[1]},
                      {"together_1_percent", h.together[0]},
                      {"together_5_percent", h.together[1]}});
    for (const auto& [name, j] : {std::pair{"together_1_percent", 0}, {"together_5_percent", 1}})
      out[name] = {{"output_error", t.level[j]}, {"loss", t.loss[j]}};
  }
  return out;
}

Json to_json(const Diagnosis& d, const std::optional<WhatIf>& w) {
  const Settings& s = d.settings;
  Json out = {{"tokens", d.tokens},
              {"attention", d.attention},
              {"variants", d.variants},
              {"embedding", name_of(s.embedding)},
              {"unit", s.unit},
              {"lengths", s.lengths},
              {"grid", d.grid},
              {"separable", d.separable},
              {"temperatures", s.temperatures},
              {"epsilons", s.epsilons}};
  add_claims_json(d, out);
  for (const auto& [name, c] : d.crossed) out["crossed"][name] = {{"times", c.times}, {"of", c.of}};
  for (const Reading r : {Reading::A, Reading::B})
    for (const Critical& c : critical(d, r, s.level))
      out["critical"][r == Reading::A ? "A" : "B"].push_back(
          {{"length", c.length}, {"N", c.N}, {"p", c.p}});
  out["findings"] = Json::array();
  for (const Finding& f : findings(d, w))
    out["findings"].push_back(
        {{"title", f.title}, {"text", f.text}, {"rule", f.rule}, {"heads", f.heads}});
  out["heads"] = Json::array();
  for (const Head& h : d.heads) out["heads"].push_back(head_json(d, h));
  if (w) out["what_if"] = to_json(*w);
  return out;
}

}  // namespace horner::diag

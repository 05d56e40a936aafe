// The numbers of a diagnosis as JSON.
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
  out["sensitivity"] = h.sensitivity;
  out["sensitivity of the most sensitive row"] = h.sensitivity_most;
  return out;
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

Json to_json(const Diagnosis& d, const std::optional<WhatIf>& w) {
  const Settings& s = d.settings;
  Json out = {{"tokens", d.tokens},
              {"embedding", name_of(s.embedding)},
              {"unit", s.unit},
              {"lengths", s.lengths},
              {"grid", d.grid},
              {"separable", d.separable},
              {"temperatures", s.temperatures},
              {"epsilons", s.epsilons}};
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
  if (!w) return out;
  out["what_if"] = {{"tokens", w->tokens},
                    {"loss", w->loss},
                    {"normalisers", effects(w->normalisers)},
                    {"plain", effects(w->plain)},
                    {"centred", effects(w->centred)}};
  for (const Truncated& t : w->truncated)
    out["what_if"]["top"].push_back({{"renormalised", t.renormalised},
                                     {"within_1_percent", t.within_1},
                                     {"within_5_percent", t.within_5},
                                     {"losses", t.losses}});
  if (w->tops) {
    const Tops& t = *w->tops;
    Json& list = out["what_if"]["top_of_heads"] = Json::array();
    for (const HeadTop& h : t.heads)
      list.push_back({{"layer", h.layer},
                      {"head", h.head},
                      {"alone_1_percent", h.alone[0]},
                      {"alone_5_percent", h.alone[1]},
                      {"together_1_percent", h.together[0]},
                      {"together_5_percent", h.together[1]}});
    for (const auto& [name, j] : {std::pair{"together_1_percent", 0}, {"together_5_percent", 1}})
      out["what_if"][name] = {{"output_error", t.level[j]}, {"loss", t.loss[j]}};
  }
  return out;
}

}  // namespace horner::diag

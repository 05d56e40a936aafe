#include "convert/probes.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <numeric>

#include "convert/swap.h"

namespace horner::convert {

static constexpr int64_t kPassage = 24, kFirst = 4;  // tokens; those not counted

double Probed::loss() const {
  return std::accumulate(losses.begin(), losses.end(), 0.) / double(losses.size());
}

static double loss_from(const Task& t, const nn::Model& m, const at::Tensor& tokens, int64_t from) {
  return effect_of(m, tokens, nn::hidden(m, tokens, t.run), {}, from).loss;
}

Probes probe(const Task& t, const std::vector<Candidate>& models) {
  const c10::NoGradGuard none;
  Probes out;
  for (int64_t d = 8; 1 + d + 2 * kPassage <= t.s.length; d *= 2) out.distances.push_back(d);
  for (const Candidate& c : models) out.models.push_back({c.name, {}, {}});
  for (Probed& p : out.models) p.copies.resize(out.distances.size());
  for (int64_t i = 0; i < t.s.evaluate_sequences; ++i) {
    next(t.hooks, "validation sequence " + std::to_string(i + 1));
    const at::Tensor text = t.sequences(uint64_t(i), 1, t.s.length, train::Split::validation);
    for (size_t m = 0; m < models.size(); ++m)
      out.models[m].losses.push_back(loss_from(t, *models[m].model, text, 0));
    for (size_t d = 0; d < out.distances.size(); ++d) {
      const at::Tensor passage = text.narrow(1, 1, kPassage);
      const at::Tensor copy =
          at::cat({text.narrow(1, 0, 1 + kPassage + out.distances[d]), passage}, 1);
      for (size_t m = 0; m < models.size(); ++m)
        out.models[m].copies[d].push_back(
            loss_from(t, *models[m].model, copy, copy.size(1) - kPassage + kFirst - 1));
    }
  }
  return out;
}

Json to_json(const Probes& p) {
  Json models = Json::array();
  for (const Probed& m : p.models)
    models.push_back(
        {{"name", m.name}, {"loss", m.loss()}, {"losses", m.losses}, {"copies", m.copies}});
  return {{"distances", p.distances}, {"models", models}};
}

}  // namespace horner::convert

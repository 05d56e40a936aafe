#include "study/taylor.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "attn/stages.h"
#include "diag/series.h"
#include "files/json.h"
#include "nn/checkpoint.h"
#include "nn/rows.h"
#include "study/tasks.h"
#include "train/checkpoint.h"

namespace horner::study {

// The visible scores, [n] in double, as defined in spec.h, before any clamp.
static at::Tensor visible_scores(const attn::Spec& spec, const attn::Inputs& given) {
  using namespace attn;
  Inputs in = given;
  in.q = attn::mapped(spec.features, given.q, given.query_projection);
  in.k = attn::mapped(spec.features, given.k, given.key_projection, in.q.size(1) / in.k.size(1));
  in = attn::one_key_head_each(in);
  const Seen seen = attn::seen(spec.mask, in);
  const auto& [hidden, count] = seen;
  at::Tensor x = at::matmul(in.q, in.k.transpose(-1, -2)).to(count.scalar_type()) *
                 attn::scale(spec, given, count);
  x = nn::capped(spec, x);
  if (spec.centred) {
    const Seen far = attn::far_keys(spec, seen);
    x = x - x.masked_fill(far.hidden, 0).sum(-1, true) / far.count.clamp_min(1);
  }
  return x.to(at::kDouble).masked_select(hidden.logical_not());
}

std::vector<std::vector<double>> log_term_means(const nn::Model& m, const at::Tensor& tokens) {
  std::vector<std::vector<double>> out(m.layers.size());
  const nn::Probe probe{[&](const nn::Operated& o) {  // of a layer of several parts, the last
    out[size_t(o.layer)] =
        diag::log_term_means(visible_scores(o.part.attention, o.in), kHighestOrder);
  }};
  const c10::NoGradGuard none;
  nn::hidden(m, tokens, {.probe = &probe});
  return out;
}

Json measure(const nn::Model& m, const train::Source& source, int64_t length) {
  constexpr int64_t kTokens = 1024;
  const int64_t sequences = std::clamp<int64_t>(kTokens / length, 1, 8);
  const at::Tensor tokens = at::empty({sequences, length}, at::kLong);
  std::vector<int64_t> targets(static_cast<size_t>(length));
  for (int64_t i = 0; i < sequences; ++i)
    source.fill(train::Split::validation, uint64_t(i),
                {tokens[i].data_ptr<int64_t>(), size_t(length)}, targets);
  Json layers = Json::array();
  for (const auto& layer : log_term_means(m, tokens)) layers.push_back(layer);
  return {{"about", "log of the mean of |score|^n / n! over visible scores, n = 0, 1, …"},
          {"layers", layers}};
}

void measure_run(const std::filesystem::path& run, const train::Settings& s) {
  const auto last = train::newest_checkpoint(run);
  if (!last || std::filesystem::exists(run / "taylor.json")) return;
  const nn::Model m = nn::load_model(*last);
  files::write_json(run / "taylor.json",
                    measure(m, make_source(s.task, s.data, s.seed, s.validation), s.length));
}

}  // namespace horner::study

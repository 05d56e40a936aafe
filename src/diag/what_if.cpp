#include "diag/what_if.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attn/plan.h"
#include "attn/stages.h"
#include "core/check.h"
#include "diag/softmax_rows.h"

namespace horner::diag {

std::vector<std::string> normalisers_of(int64_t length) {
  const int64_t few = std::max<int64_t>(1, int64_t(std::llround(0.06 * double(length))));
  return {"softmax:temperature=0.1",
          "softmax:temperature=0.5",
          "softmax:temperature=2",
          "ssmax",
          "sparsemax",
          "entmax15",
          "asentmax",
          "topk" + std::to_string(few),
          "sa_softmax",
          "softmax1",
          "adaptive_temperature",
          "l2"};
}

attn::Spec switched(const attn::Spec& layer, const attn::Spec& variant) {
  attn::Spec s = variant;
  s.features = layer.features, s.scale = layer.scale, s.mask = layer.mask;
  s.temperature = layer.temperature * variant.temperature;
  return s;
}

Heads all_heads(const nn::Model& m) {
  Heads out;
  for (int64_t i = 0; i < int64_t(m.layers.size()); ++i)
    for (int64_t h = 0; h < m.config.H; ++h) out.emplace_back(i, h);
  return out;
}

// The mean of log n over the rows of a text, n visible tokens.
static double mean_log(const attn::Mask& mask, int64_t T) {
  double sum = 0;
  for (int64_t t = 0; t < T; ++t) {
    const auto [lo, hi] = attn::interval(mask, t, T, T);
    sum += std::log(double(hi - lo));
  }
  return std::max(1e-6, sum / double(T));
}

double loss(const nn::Model& m, const at::Tensor& tokens, std::span<const Switch> switches) {
  const c10::InferenceMode none;
  const at::Tensor row = tokens.reshape({1, -1});
  const int64_t T = row.size(1), H = m.config.H;
  const nn::Probe probe{
      [&](int64_t layer, const attn::Spec& own, const attn::Inputs& in, const at::Tensor& result) {
        for (const Switch& s : switches) {
          std::vector<int64_t> here;
          for (const auto& [i, h] : s.heads)
            if (i == layer) here.push_back(h);
          if (here.empty()) continue;
          const attn::Spec spec = switched(own, s.variant);
          attn::Inputs with = in;
          const double per_log = 1 / mean_log(spec.mask, T);
          if (attn::is<attn::LogLength>(spec.sharpness))
            with.length_scale = at::full({H}, per_log, in.q.options());
          if (attn::is<attn::LogPower>(spec.sharpness))
            with.log_power =
                at::tensor({0., per_log, 1.}).to(in.q.options()).expand({H, 3}).contiguous();
          const at::Tensor index = at::tensor(here, at::kLong).to(result.device());
          const at::Tensor other = attn::attend(spec, with);
          result.index_copy_(1, index, other.index_select(1, index).to(result.scalar_type()));
        }
      }};
  const at::Tensor x = nn::hidden(m, row, {.probe = &probe});
  const at::Tensor targets = row[0].narrow(0, 1, T - 1);
  return nn::cross_entropy(m, x[0].narrow(0, 0, T - 1), targets).item<double>();
}

namespace {

struct Variant {
  std::string name;
  attn::Spec spec;
  RowEffect rows = {};
};

// [H], means over the rows.
at::Tensor entropy_ratio(const at::Tensor& weights, const nn::Rows& rows) {
  const at::Tensor a = weights.abs(), p = a / a.sum(-1, true).clamp_min(1e-30);
  const at::Tensor n = at::tensor(rows.count).to(a.scalar_type()).unsqueeze(0);
  return (-at::xlogy(p, p).sum(-1) / n.clamp_min(2).log()).mean(-1);
}

// Means over the rows that see more than N tokens; 1 for a head without such rows.
std::vector<double> shares_of(const nn::Rows& rows, const at::Tensor& weights,
                              const at::Tensor& values, int64_t N) {
  const at::Tensor share = nn::separable_share(rows, weights, values, N).nanmean(-1).nan_to_num_(1);
  return {share.data_ptr<double>(), share.data_ptr<double>() + share.numel()};
}
double mean(const std::vector<double>& all) {
  return std::accumulate(all.begin(), all.end(), 0.) / double(all.size());
}

// The rows of the unchanged model under every variant. Returns each head's separable share.
std::vector<double> look_at_rows(const nn::Model& m, const at::Tensor& tokens,
                                 std::vector<Variant>& variants, const Say& say) {
  const int64_t T = tokens.numel(), L = int64_t(m.layers.size());
  const std::vector<nn::Query> queries = nn::few_queries(T, 16);
  const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(0);
  std::vector<double> shares;
  const auto layer = [&](int64_t i, const attn::Spec& own, const attn::Inputs& in,
                         const at::Tensor&) {
    if (say) say("rows of layer " + std::to_string(i));
    const std::string why = nn::why_no_rows(own);
    check(why.empty(), "layer ", i, " has no attention weights to analyse: ", why);
    const at::Tensor v = attn::one_key_head_each(in).v[0].to(at::kCPU, at::kFloat);
    nn::for_rows(own, in, queries, [&](const nn::Rows& rows) {  // one block
      const at::Tensor values = v.narrow(1, 0, rows.weights.size(-1));
      const at::Tensor o = at::matmul(rows.weights.to(at::kFloat), values);
      for (double share : shares_of(rows, rows.weights, values, std::min<int64_t>(20, T / 4)))
        shares.push_back(share);
      const at::Tensor way = directions(rows, random);
      for (Variant& x : variants) {
        const attn::Spec& spec = x.spec;
        const at::Tensor w = nn::weights_of(spec, rows);
        nn::Rows moved = rows;
        moved.scores = rows.scores + 0.1 * way;
        const double all = double(L);
        x.rows.entropy_ratio += entropy_ratio(w, rows).mean().item<double>() / all;
        x.rows.share +=
            (attn::may_be_negative(spec) ? NAN : mean(shares_of(rows, w, values, 5))) / all;
        x.rows.sensitivity +=
            ((nn::weights_of(spec, moved) - w).norm(2, -1) / 0.1).mean().item<double>() / all;
        const at::Tensor e = (at::matmul(w.to(at::kFloat), values) - o).flatten(1).norm(2, -1) /
                             o.flatten(1).norm(2, -1).clamp_min(1e-30);
        for (int64_t h = 0; h < e.size(0); ++h) x.rows.moved.push_back(e[h].item<double>());
      }
    });
  };
  const c10::InferenceMode none;
  const nn::Probe probe{layer};
  nn::hidden(m, tokens.reshape({1, -1}), {.probe = &probe});
  return shares;
}

// The n heads with the least values.
Heads least(const Heads& all, const std::vector<double>& by, size_t n) {
  std::vector<size_t> order(all.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::isnan(by[b]) ? !std::isnan(by[a]) : by[a] < by[b];
  });
  Heads out;
  for (size_t i = 0; i < std::max<size_t>(1, n); ++i) out.push_back(all[order[i]]);
  return out;
}

}  // namespace

WhatIf what_if(const nn::Model& m, const at::Tensor& tokens, const WhatIfAsked& asked,
               const Say& say) {
  const int64_t T = tokens.numel();
  check(T >= 16, "--what-if requires a text of at least 16 tokens, not ", T);
  std::vector<Variant> variants;
  for (const std::string& name : asked.normalisers.empty() ? normalisers_of(T) : asked.normalisers)
    variants.push_back({name, attn::find(name).spec});
  const size_t normalisers = variants.size();
  for (const char* family : {"taylor", "centred_taylor"})
    for (int n = 1; n <= asked.orders; ++n)
      variants.push_back({family + std::to_string(n), attn::find(family + std::to_string(n)).spec});
  const Heads all = all_heads(m);
  const std::vector<double> shares = look_at_rows(m, tokens, variants, say);
  const Heads saturated = least(all, shares, all.size() / 4);
  WhatIf out{.tokens = T, .loss = loss(m, tokens, {})};
  const auto with = [&](const attn::Spec& spec, const Heads& heads) {
    const Switch s{spec, heads};
    return loss(m, tokens, {&s, 1});
  };
  for (size_t i = 0; i < variants.size(); ++i) {
    const Variant& v = variants[i];
    if (say) say(v.name);
    const bool order = i >= normalisers;
    const Effect e{v.name, v.rows, with(v.spec, all),
                   with(v.spec, least(all, v.rows.moved, all.size() / 2)),
                   order ? NAN : with(v.spec, saturated)};
    (!order ? out.normalisers : v.spec.centred ? out.centred : out.plain).push_back(e);
  }
  if (asked.truncations) {
    for (bool renormalise : {false, true})
      out.truncated.push_back(truncate(m, tokens, out.loss, renormalise, say));
    out.tops = tops_of_heads(m, tokens, out.loss, say);
  }
  return out;
}

}  // namespace horner::diag

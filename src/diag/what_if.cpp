#include "diag/what_if.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attn/plan.h"
#include "attn/spec_text.h"
#include "attn/stages.h"
#include "core/check.h"
#include "diag/layers.h"
#include "diag/softmax_rows.h"
#include "nn/pattern.h"

namespace horner::diag {

std::vector<std::string> normalisers_of(int64_t length, const std::string& attention) {
  const int64_t few = std::max<int64_t>(1, int64_t(std::llround(0.06 * double(length))));
  // The model's own operator at other temperatures; of several operators, softmax.
  const std::string own = nn::pattern(attention).size() == 1 ? attention : "softmax";
  const std::string at = own + (own.find(':') == own.npos ? ":" : ",") + "temperature=";
  std::vector<std::string> out{at + "0.1", at + "0.5", at + "2"};
  if (own != "softmax") out.push_back("softmax");
  for (const char* name : {"ssmax", "sparsemax", "entmax15", "asentmax"}) out.push_back(name);
  out.push_back("topk" + std::to_string(few));
  for (const char* name : {"sa_softmax", "softmax1", "adaptive_temperature", "l2"})
    out.push_back(name);
  std::erase(out, own);
  return out;
}

attn::Spec switched(const attn::Spec& layer, const attn::Spec& variant) {
  attn::Spec s = variant;
  s.features = layer.features, s.scale = layer.scale, s.mask = layer.mask;
  if (s.softcap == 0) s.softcap = layer.softcap;
  s.temperature = layer.temperature * variant.temperature;
  return s;
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

// The operator as its reference has it, with the N largest weights of each row; without decay, bias
// and near keys, which no head with rows has.
static at::Tensor attend_cut(const attn::Spec& given, const attn::Inputs& all, const Cut& cut) {
  auto [spec, in] = attn::with_value_gates(given, all);
  in.q = attn::mapped(spec.features, in.q, in.query_projection);
  in.k = attn::mapped(spec.features, in.k, in.key_projection, in.q.size(1) / in.k.size(1));
  in = attn::one_key_head_each(in);
  const attn::Seen seen = attn::seen(spec.mask, in);
  const at::Tensor x = at::matmul(in.q, in.k.transpose(-1, -2)).to(seen.count.scalar_type());
  at::Tensor shift,
      w = attn::weights(spec, nn::capped(spec, x * attn::scale(spec, all, seen.count)), seen,
                        shift);
  const int64_t N = std::min(cut.N, w.size(-1));
  const at::Tensor least = std::get<0>(w.masked_fill(seen.hidden, -INFINITY).topk(N, -1));
  const at::Tensor kept = w.masked_fill(w < least.narrow(-1, N - 1, 1), 0);
  at::Tensor v = in.v.to(w.scalar_type());
  if (spec.input_gate) v = v * in.input_gate.unsqueeze(-1);
  attn::Sums sums{
      at::matmul(kept, v), (cut.renormalise ? kept : w).sum(-1, true), shift, seen.count, {}};
  if (in.denominator_gate.defined())
    sums.gates = in.denominator_gate.exp().unsqueeze(-2).masked_fill(seen.hidden, 0).sum(-1, true);
  return attn::finish(spec, all, sums);
}

// The same for softmax, which has kernels for it.
static at::Tensor attend_top(const attn::Spec& own, const attn::Inputs& in, const Cut& cut) {
  const attn::Spec plain = switched(own, attn::Spec{});
  if (attn::text(own) != attn::text(plain)) return attend_cut(own, in, cut);
  attn::Spec top = own;
  top.weight = attn::TopK{int(cut.N), cut.renormalise}, top.denominator = attn::Nothing{};
  return attn::attend(top, in);
}

double loss(const nn::Model& m, const at::Tensor& tokens, std::span<const Switch> switches,
            std::span<const Cut> cuts) {
  const c10::InferenceMode none;
  const at::Tensor row = tokens.reshape({1, -1});
  const int64_t T = row.size(1);
  const auto in_part = [&](const nn::Operated& o, const Heads& heads) {  // places among its heads
    std::vector<int64_t> out;
    for (const auto& [i, h] : heads)
      if (const auto at = std::ranges::find(o.part.heads, h);
          i == o.layer && at != o.part.heads.end()) {
        const std::string why = why_no_rows(m.config.layers[size_t(i)], h);
        check(why.empty(), "head ", i, ".", h, " has no weights to change: ", why);
        out.push_back(at - o.part.heads.begin());
      }
    return out;
  };
  const auto replace = [](const at::Tensor& result, const at::Tensor& other,
                          const std::vector<int64_t>& heads) {
    const at::Tensor index = at::tensor(heads, at::kLong).to(result.device());
    result.index_copy_(1, index, other.index_select(1, index).to(result.scalar_type()));
  };
  const nn::Probe probe{[&](const nn::Operated& o) {
    const attn::Spec& own = o.part.attention;
    const attn::Inputs& in = o.in;
    const at::Tensor& result = o.result;
    const int64_t H = in.q.size(1);
    for (const Switch& s : switches) {
      const std::vector<int64_t> here = in_part(o, s.heads);
      if (here.empty()) continue;
      const attn::Spec spec = switched(own, s.variant);
      attn::Inputs with = in;
      const double per_log = 1 / mean_log(spec.mask, T);
      if (attn::is<attn::LogLength>(spec.sharpness))
        with.length_scale = at::full({H}, per_log, in.q.options());
      if (attn::is<attn::LogPower>(spec.sharpness))
        with.log_power =
            at::tensor({0., per_log, 1.}).to(in.q.options()).expand({H, 3}).contiguous();
      replace(result, attn::attend(spec, with), here);
    }
    for (const Cut& c : cuts)
      if (const std::vector<int64_t> here = in_part(o, c.heads); !here.empty())
        replace(result, attend_top(own, in, c), here);
  }};
  const at::Tensor x = nn::hidden(m, row, {.probe = &probe});
  const at::Tensor targets = row[0].narrow(0, 1, T - 1);
  return nn::cross_entropy(m, x[0].narrow(0, 0, T - 1), targets).item<double>();
}

namespace {

struct Variant {
  Effect* effect;
  attn::Spec spec;
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
  const int64_t T = tokens.numel();
  const std::vector<nn::Query> queries = nn::few_queries(T, 16);
  const at::Generator random = at::make_generator<at::CPUGeneratorImpl>(0);
  std::vector<double> shares;
  for (Variant& x : variants) x.effect->rows = {0, 0, 0, {}};
  const Heads can = heads_with_rows(m.config);
  double L = 0;  // parts of layers
  const auto layer = [&](const nn::Operated& o) {
    const attn::Spec& own = o.part.attention;
    const attn::Inputs& in = o.in;
    if (std::ranges::find(can, std::pair(o.layer, o.part.heads[0])) == can.end()) return;
    if (say) say("rows of layer " + std::to_string(o.layer));
    ++L;
    const at::Tensor v = attn::one_key_head_each(in).v[0].to(at::kCPU, at::kFloat);
    nn::for_rows(own, in, queries, [&](const nn::Rows& rows) {  // one block
      const at::Tensor values = v.narrow(1, 0, rows.weights.size(-1));
      const at::Tensor o = at::matmul(rows.weights.to(at::kFloat), values);
      for (double share : shares_of(rows, rows.weights, values, std::min<int64_t>(20, T / 4)))
        shares.push_back(share);
      const at::Tensor way = directions(rows, random);
      for (Variant& x : variants) {
        const attn::Spec& spec = x.spec;
        RowEffect& sum = x.effect->rows;
        const at::Tensor w = nn::weights_of(spec, rows);
        nn::Rows moved = rows;
        moved.scores = rows.scores + 0.1 * way;
        sum.entropy_ratio += entropy_ratio(w, rows).mean().item<double>();
        sum.share += (attn::may_be_negative(spec) ? NAN : mean(shares_of(rows, w, values, 5)));
        sum.sensitivity +=
            ((nn::weights_of(spec, moved) - w).norm(2, -1) / 0.1).mean().item<double>();
        const at::Tensor e = (at::matmul(w.to(at::kFloat), values) - o).flatten(1).norm(2, -1) /
                             o.flatten(1).norm(2, -1).clamp_min(1e-30);
        for (int64_t h = 0; h < e.size(0); ++h) sum.moved.push_back(e[h].item<double>());
      }
    });
  };
  const c10::InferenceMode none;
  const nn::Probe probe{layer};
  nn::hidden(m, tokens.reshape({1, -1}), {.probe = &probe});
  for (Variant& x : variants)
    for (double* mean :
         {&x.effect->rows.entropy_ratio, &x.effect->rows.share, &x.effect->rows.sensitivity})
      *mean /= L;
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

void losses_of_model(const nn::Model& m, const at::Tensor& tokens, const WhatIfAsked& asked,
                     WhatIf& out, const Say& say, const std::function<void(const Effect&)>& done) {
  const int64_t T = tokens.numel();
  check(T >= 16, "--what-if requires a text of at least 16 tokens, not ", T);
  out = {.tokens = T, .attention = attention_of(m.config)};
  const Heads all = heads_with_rows(m.config);
  std::vector<std::pair<std::string, std::vector<Effect>*>> wanted;
  for (const std::string& name :
       asked.normalisers.empty() ? normalisers_of(T, out.attention) : asked.normalisers)
    wanted.emplace_back(name, &out.normalisers);
  for (int n = 1; n <= asked.orders; ++n) {
    wanted.emplace_back("taylor" + std::to_string(n), &out.plain);
    wanted.emplace_back("centred_taylor" + std::to_string(n), &out.centred);
  }
  for (const auto& [name, list] : wanted) attn::find(name);  // a wrong name before the work
  if (say) say("unchanged");
  out.loss = loss(m, tokens, {});
  if (done) done({out.attention, out.loss});
  for (const auto& [name, list] : wanted) {
    if (say) say(name);
    const Switch s{attn::find(name).spec, all};
    list->push_back({name, loss(m, tokens, {&s, 1})});
    if (done) done(list->back());
  }
  if (asked.truncations)
    for (bool renormalise : {false, true})
      out.truncated.push_back(truncate(m, tokens, out.loss, renormalise, say));
  out.whole = !asked.per_head;
}

void losses_of_heads(const nn::Model& m, const at::Tensor& tokens, WhatIf& out, const Say& say) {
  const Heads all = heads_with_rows(m.config);
  std::vector<Variant> variants;
  for (auto* list : {&out.normalisers, &out.plain, &out.centred})
    for (Effect& e : *list) variants.push_back({&e, attn::find(e.name).spec});
  const std::vector<double> shares = look_at_rows(m, tokens, variants, say);
  const Heads saturated = least(all, shares, all.size() / 4);
  const auto with = [&](const Variant& v, const Heads& heads) {
    const Switch s{v.spec, heads};
    return loss(m, tokens, {&s, 1});
  };
  for (const Variant& v : variants) {
    if (say) say(v.effect->name + " in some heads");
    v.effect->half = with(v, least(all, v.effect->rows.moved, all.size() / 2));
    if (&v - variants.data() < long(out.normalisers.size()))  // not for the orders
      v.effect->saturated = with(v, saturated);
  }
  if (!out.truncated.empty()) out.tops = tops_of_heads(m, tokens, out.loss, say);
  out.whole = true;
}

}  // namespace horner::diag

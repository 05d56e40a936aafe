#include "nn/rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attn/plan.h"
#include "attn/stages.h"
#include "core/check.h"

namespace horner::nn {

using namespace attn;

std::vector<Query> sample_queries(int64_t T, int64_t each) {
  constexpr int64_t kAll = 1024;
  std::vector<Query> out;
  for (int64_t t = 0; t < std::min(T, kAll); ++t) out.push_back({t, 1});
  for (int64_t from = kAll; from < T; from *= 2) {
    const int64_t size = std::min(from, T - from), n = std::min(each, size);
    for (int64_t i = 0; i < n; ++i)
      out.push_back({from + (2 * i + 1) * size / (2 * n), double(size) / double(n)});
  }
  return out;
}

std::vector<Query> few_queries(int64_t T, int64_t most) {
  std::vector<Query> out;
  const int64_t n = std::min(most, T - 1);
  for (int64_t i = 0; i < n; ++i) out.push_back({1 + (2 * i + 1) * (T - 1) / (2 * n), 1});
  return out;
}

at::Tensor capped(const Spec& spec, const at::Tensor& x) {
  return spec.softcap == 0 ? x : (x / spec.softcap).tanh_().mul_(spec.softcap);
}

std::string why_no_rows(const Spec& spec) {
  if (may_be_negative(spec)) return "the analysis does not support negative weights";
  if (!is<NoDecay>(spec.decay)) return "the analysis does not support decay gates";
  if (sees_future(spec.mask) || !is_interval(spec.mask))
    return "the analysis requires a mask of one interval of past keys";
  if (spec.bias || !is<attn::NoKeys>(spec.near))
    return "the analysis does not support bias or near";
  if (is<attn::Delta>(spec.values)) return "the analysis does not support values=delta";
  return "";
}

// [H, R, S] scores of a block of queries with all keys up to the last of them.
static Rows block_rows(const Spec& spec, const Inputs& in, std::span<const Query> queries) {
  Rows rows{.queries = queries};
  std::vector<int64_t> at;
  for (const Query& q : queries) {
    at.push_back(q.t);
    const auto [lo, hi] = interval(spec.mask, q.t, q.t + 1, q.t + 1);
    rows.begin.push_back(lo), rows.count.push_back(hi - lo);
  }
  const int64_t S = at.back() + 1, R = int64_t(at.size());
  const at::Tensor index = at::tensor(at, at::kLong), first = at::tensor(rows.begin, at::kLong);
  const at::Tensor s = at::arange(S).unsqueeze(0);
  rows.hidden =
      (s > index.unsqueeze(1)).logical_or(s < first.unsqueeze(1)).unsqueeze(0);  // [1, R, S]
  const at::Tensor q = in.q[0].index_select(1, index), k = in.k[0].narrow(1, 0, S);
  const at::Tensor count = at::tensor(rows.count).to(q.scalar_type()).view({1, R, 1});
  Inputs scaled = in;
  scaled.q = q.unsqueeze(0);
  const at::Tensor factor = attn::scale(spec, scaled, count);
  rows.scores = capped(spec, at::matmul(q, k.transpose(-1, -2)).mul_(factor));
  const at::Tensor longest = k.norm(2, -1).unsqueeze(1).masked_fill(rows.hidden, 0).amax(-1);
  rows.largest_product = q.norm(2, -1) * longest * factor.abs().squeeze(-1);
  at::Tensor shift;
  at::Tensor w = attn::weights(spec, rows.scores, {rows.hidden, count}, shift);
  rows.weights = w.div_(w.sum(-1, true).clamp_min(1e-30));
  return rows;
}

void for_rows(const Spec& spec, const Inputs& given, std::span<const Query> queries,
              const std::function<void(const Rows&)>& look) {
  check(given.q.size(0) == 1, "expected a batch of one text, got ", given.q.size(0));
  Inputs in = given;
  in.q = attn::mapped(spec.features, given.q, given.query_projection);
  in.k = attn::mapped(spec.features, given.k, given.key_projection, in.q.size(1) / in.k.size(1));
  in.v = at::Tensor();  // unused; repeating it per head would take memory
  in = attn::one_key_head_each(in);
  const auto plain = [](const at::Tensor& x) {
    return x.defined() ? x.detach().to(at::kCPU, attn::wide(x.scalar_type())) : x;
  };
  in.q = plain(in.q), in.k = plain(in.k);
  in.length_scale = plain(in.length_scale), in.log_power = plain(in.log_power);
  constexpr int64_t kMostNumbers = 4 << 20;
  for (size_t from = 0; from < queries.size();) {
    size_t to = from + 1;
    const auto fits = [&](size_t end) {
      return in.q.size(1) * int64_t(end - from) * (queries[end - 1].t + 1) <= kMostNumbers;
    };
    while (to < queries.size() && to - from < 256 && fits(to + 1)) ++to;
    look(block_rows(spec, in, queries.subspan(from, to - from)));
    from = to;
  }
}

at::Tensor weights_of(const Spec& spec, const Rows& rows) {
  const at::Tensor count = at::tensor(rows.count).to(rows.scores.scalar_type()).view({1, -1, 1});
  at::Tensor x = rows.scores / spec.temperature, shift;
  if (sharpness_from(spec.sharpness) == SharpnessFrom::count)
    x = x * count.log() / count.log().mean().clamp_min(1e-6);
  const at::Tensor w = attn::weights(spec, x, {rows.hidden, count}, shift);
  const at::Tensor sum = w.sum(-1, true);
  return w / at::where(sum.abs() < 1e-30, at::full_like(sum, 1e-30), sum);
}

// |a_i x_i - s|^2 - |s|^2 = a_i (a_i |x_i|^2 - 2 x_i.s) orders tokens as their distances do.
at::Tensor separable_share(const Rows& rows, const at::Tensor& weights, const at::Tensor& values,
                           int64_t N) {
  const at::Tensor a = weights.to(at::kDouble), v = values.to(at::kDouble);  // [H, R, S], [H, S, E]
  const at::Tensor count = at::tensor(rows.count).unsqueeze(0);              // [1, R]
  if (a.size(-1) <= N) return at::full({a.size(0), a.size(1)}, NAN, at::kDouble);
  const at::Tensor x = v / v.norm(2, -1, true).clamp_min(1e-30);
  const at::Tensor top = std::get<1>(a.masked_fill(rows.hidden, -1).topk(N, -1));
  const at::Tensor chosen = at::zeros_like(a, at::kBool).scatter_(-1, top, true);
  const at::Tensor s = at::matmul(a * chosen, x);  // [H, R, E]
  const at::Tensor near =
      a * (a * x.square().sum(-1).unsqueeze(1) - 2 * at::matmul(s, x.transpose(-1, -2)));
  const at::Tensor nearest =
      near.masked_fill(chosen.logical_or(rows.hidden), INFINITY).amin(-1, true);
  const at::Tensor inside = near.lt(nearest).logical_and(chosen).sum(-1);
  return (inside.to(at::kDouble) / double(N)).masked_fill_(count.le(N), NAN);
}

}  // namespace horner::nn

#include "diag/softmax_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attn/stages.h"

namespace horner::diag {

RowNumbers row_numbers(const nn::Rows& r) {
  const at::Tensor &a = r.weights, &x = r.scores;
  const int64_t S = a.size(-1);
  std::vector<int64_t> t;
  for (const nn::Query& q : r.queries) t.push_back(q.t);
  const at::Tensor n = at::tensor(r.count).to(a.scalar_type()).unsqueeze(0);  // [1, R]
  const at::Tensor place = at::arange(S).to(a.scalar_type());
  const at::Tensor seen = x.masked_fill(r.hidden, 0), mean = seen.sum(-1) / n;
  const at::Tensor off = (x - mean.unsqueeze(-1)).masked_fill_(r.hidden, 0);
  const at::Tensor high = x.masked_fill(r.hidden, -INFINITY), sum = high.logsumexp(-1);
  return {
      .entropy = -at::xlogy(a, a).sum(-1),
      .support = a.square().sum(-1).clamp_min(1e-30).reciprocal(),
      .first = a.select(-1, 0),
      .reach = at::tensor(t).to(a.scalar_type()).unsqueeze(0) - at::matmul(a, place),
      .largest = a.amax(-1),
      .spread = (off.square().sum(-1) / n).sqrt(),
      .log_high = high.amax(-1) - sum + n.log(),
      .log_low = x.masked_fill(r.hidden, INFINITY).amin(-1) - sum + n.log(),
      .most = seen.abs().amax(-1),
  };
}

// a' - a = a (u - c) / (1 + c) with u = e^(eps v / T) - 1 and c = sum a u is accurate for small
// differences; for large eps / T, where u may overflow, subtract directly.
at::Tensor sensitivity(const at::Tensor& scores, const at::Tensor& hidden, const at::Tensor& v,
                       double T, double eps) {
  const at::Tensor x = scores.masked_fill(hidden, -INFINITY) / T, a = x.softmax(-1);
  at::Tensor moved;
  if (eps / T <= 1) {
    const at::Tensor u = (v * (eps / T)).expm1_(), c = (a * u).sum(-1, true);
    moved = a * (u - c) / (1 + c);
  } else {
    moved = (x + v * (eps / T)).softmax(-1) - a;
  }
  return moved.norm(2, -1) / eps;
}

at::Tensor sensitivity(const attn::Spec& spec, bool softmax, const RowScores& r, double T,
                       double eps) {
  if (softmax) return sensitivity(r.scores, r.hidden, r.v, T, eps);
  const auto weights = [&](const at::Tensor& x) {
    at::Tensor shift, w = attn::weights(spec, x / T, {r.hidden, r.count.to(at::kDouble)}, shift);
    return w / w.sum(-1, true).clamp_min(1e-30);
  };
  const at::Tensor x = r.scores.to(at::kDouble);  // a small difference of two results
  return (weights(x + eps * r.v) - weights(x)).norm(2, -1) / eps;
}

double sensitivity_bound(double T, double eps) {
  return std::min(1 / (2 * T), std::sqrt(2) / eps);
}
double sensitivity_printed(double T) {
  return std::min(1 / (4 * T), std::sqrt(2));
}

at::Tensor directions(const nn::Rows& r, at::Generator random) {
  at::Tensor v = at::randn(r.scores.sizes(), random, r.scores.options()).masked_fill_(r.hidden, 0);
  return v / v.norm(2, -1, true).clamp_min(1e-30);
}

}  // namespace horner::diag

#include "diag/series.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attn/catalog.h"
#include "attn/stages.h"

namespace horner::diag {

int enough(const std::vector<double>& errors, double most) {
  int n = int(errors.size());
  while (n > 0 && errors[size_t(n - 1)] < most) --n;
  return n < int(errors.size()) ? n : kMostOrder + 1;
}

// The floor under the mean weight of taylor<n>; 0 for an operator that is a series without one.
static double floor_of(const attn::Spec& own, int n) {
  const auto* sum = std::get_if<attn::Sum>(&own.denominator);
  if (attn::facts(own.weight).orders && (!sum || sum->floor == 0)) return 0;
  const attn::Spec cut = attn::find("taylor" + std::to_string(n)).spec;
  return std::get<attn::Sum>(cut.denominator).floor;
}

// Relative errors at order 0, 1, …, `last` for scores [R, S]; the exact output is o [R, E].
static std::vector<double> errors(const attn::Spec& own, const at::Tensor& scores,
                                  const at::Tensor& hidden, const at::Tensor& v,
                                  const at::Tensor& o, int last) {
  const at::Tensor x = scores.masked_fill(hidden, 0);
  const double size = std::max(1e-300, o.norm().item<double>());
  at::Tensor term = at::ones_like(x).masked_fill_(hidden, 0), w = term.clone();
  const at::Tensor count = hidden.logical_not().sum(-1, true);
  std::vector<double> out;
  for (int n = 0; n <= last; ++n) {
    if (n > 0) w += term.mul_(x).div_(n);
    at::Tensor W = w.sum(-1, true);
    if (const double floor = floor_of(own, n); floor > 0) W = at::maximum(W, floor * count);
    W = at::where(W.abs() < 1e-6, at::where(W < 0, -1e-6, 1e-6).to(W.scalar_type()), W);
    out.push_back((at::matmul(w, v) / W - o).norm().item<double>() / size);
    if (n > 8 && out.back() < 1e-4) break;
  }
  return out;
}

// Powers of |x| / largest by repeated products: they stay within [0, 1].
std::vector<double> log_term_means(const at::Tensor& scores, int orders) {
  const double largest = scores.abs().max().item<double>();
  const at::Tensor y = scores.abs() / (largest > 0 ? largest : 1);
  at::Tensor power = at::ones_like(y);
  std::vector<double> out;
  for (int n = 0; n <= orders; ++n) {
    const double unit = n > 0 ? n * std::log(largest) : 0;
    out.push_back(std::log(power.mean().item<double>()) + unit - std::lgamma(n + 1.0));
    power.mul_(y);
  }
  return out;
}

int dominant_order(const std::vector<double>& means) {
  return int(std::max_element(means.begin(), means.end()) - means.begin());
}

// The inputs of one head; features are already mapped.
static attn::Inputs head_of(const attn::Inputs& in, int64_t h) {
  const int64_t g = h * in.k.size(1) / in.q.size(1);
  attn::Inputs out{.q = in.q.narrow(1, h, 1), .k = in.k.narrow(1, g, 1), .v = in.v.narrow(1, g, 1)};
  for (at::Tensor* x : {&out.q, &out.k, &out.v}) *x = x->to(at::kCPU, at::kDouble);
  if (in.length_scale.defined()) out.length_scale = in.length_scale.narrow(0, h, 1);
  if (in.log_power.defined()) out.log_power = in.log_power.narrow(0, h, 1);
  return out;
}

// One head at a time: the rows of all heads in double would take more memory than the model does.
std::vector<HeadSeries> series(const attn::Spec& given, const attn::Inputs& all,
                               std::span<const nn::Query> queries) {
  attn::Inputs in = all;
  in.q = attn::mapped(given.features, all.q, all.query_projection);
  in.k = attn::mapped(given.features, all.k, all.key_projection, all.q.size(1) / all.k.size(1));
  attn::Spec spec = given;
  spec.features = attn::Identity{};
  std::vector<HeadSeries> out(size_t(in.q.size(1)));
  const int64_t S = queries.back().t + 1;
  const auto own = attn::facts(given.weight).orders;
  const int last = own ? std::min(own->last, kMostOrder) : kMostOrder;
  for (size_t i = 0; i < out.size(); ++i) {
    const attn::Inputs one = head_of(in, int64_t(i));
    std::vector<at::Tensor> scores, hidden, weights;
    nn::for_rows(
        spec, one, queries, [&](const nn::Rows& r) {  // pad every block to the width of the last
          scores.push_back(at::constant_pad_nd(r.scores[0], {0, S - r.scores.size(-1)}));
          hidden.push_back(at::constant_pad_nd(r.hidden[0], {0, S - r.hidden.size(-1)}, 1));
          weights.push_back(at::constant_pad_nd(r.weights[0], {0, S - r.weights.size(-1)}));
        });
    const at::Tensor x = at::cat(scores), h = at::cat(hidden);  // [R, S]
    const at::Tensor v = one.v[0][0].narrow(0, 0, S);
    const at::Tensor centred =
        x - x.masked_fill(h, 0).sum(-1, true) / h.logical_not().sum(-1, true);
    const at::Tensor o = at::matmul(at::cat(weights), v);
    const at::Tensor seen = x.masked_select(h.logical_not());
    out[i] = {dominant_order(log_term_means(seen)), seen.abs().max().item<double>(),
              errors(given, x, h, v, o, last), errors(given, centred, h, v, o, last)};
  }
  return out;
}

}  // namespace horner::diag

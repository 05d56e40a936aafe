#include "diag/series.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "attn/exec/stages.h"

namespace horner::diag {

int enough(const std::vector<double>& errors, double most) {
  int n = int(errors.size());
  while (n > 0 && errors[size_t(n - 1)] < most) --n;
  return n < int(errors.size()) ? n : kMostOrder + 1;
}

// Errors of order 0, 1, … of the rows x [H, R, S], whose result should be o [H, R, E].
static void add_errors(const at::Tensor& scores, const at::Tensor& hidden, const at::Tensor& v,
                       const at::Tensor& o, std::vector<HeadSeries>& out,
                       std::vector<double> HeadSeries::* errors) {
  const at::Tensor x = scores.masked_fill(hidden, 0), size = o.flatten(1).norm(2, -1);
  at::Tensor term = at::ones_like(x).masked_fill_(hidden, 0), w = term.clone();
  for (int n = 0; n <= kMostOrder; ++n) {
    if (n > 0) w += term.mul_(x / n);
    at::Tensor W = w.sum(-1, true);
    W = at::where(W.abs() < 1e-6, at::where(W < 0, -1e-6, 1e-6).to(W.scalar_type()), W);
    const at::Tensor error =
        (at::matmul(w, v) / W - o).flatten(1).norm(2, -1) / size.clamp_min(1e-300);
    for (size_t h = 0; h < out.size(); ++h)
      (out[h].*errors).push_back(error[int64_t(h)].item<double>());
    if (n > 8 && error.max().item<double>() < 1e-4) break;
  }
}

// argmax over n of sum |x|^n / n!, by logarithms: the terms outgrow a double.
static int dominant_order(const at::Tensor& scores) {
  const at::Tensor logs = scores.abs().log();
  int best = 0;
  double most = std::log(double(scores.numel()));
  for (int n = 1; n <= kMostOrder; ++n) {
    const double size = at::logsumexp(logs * double(n), {0}).item<double>() - std::lgamma(n + 1.);
    if (size > most) most = size, best = n;
  }
  return best;
}

std::vector<HeadSeries> series(const attn::Spec& spec, const attn::Inputs& in,
                               std::span<const nn::Query> queries) {
  std::vector<HeadSeries> out(size_t(in.q.size(1)));
  std::vector<at::Tensor> scores, hidden;
  attn::Inputs wide = in;
  wide.q = in.q.to(at::kDouble), wide.k = in.k.to(at::kDouble);
  const int64_t S = queries.back().t + 1;
  nn::for_rows(spec, wide, queries, [&](const nn::Rows& r) {  // every block as wide as the last
    scores.push_back(at::constant_pad_nd(r.scores, {0, S - r.scores.size(-1)}));
    hidden.push_back(at::constant_pad_nd(r.hidden, {0, S - r.hidden.size(-1)}, 1));
  });
  const at::Tensor x = at::cat(scores, 1), h = at::cat(hidden, 1);
  const at::Tensor v =
      attn::exec::one_key_head_each(in).v[0].narrow(1, 0, S).to(at::kCPU, at::kDouble);
  const at::Tensor count = h.logical_not().sum(-1, true);
  const at::Tensor centred = x - x.masked_fill(h, 0).sum(-1, true) / count;
  const at::Tensor o = at::matmul(x.masked_fill(h, -INFINITY).softmax(-1), v);
  for (size_t i = 0; i < out.size(); ++i) {
    const at::Tensor seen = x[int64_t(i)].masked_select(h[0].logical_not());
    out[i].dominant = dominant_order(seen);
    out[i].largest = seen.abs().max().item<double>();
  }
  add_errors(x, h, v, o, out, &HeadSeries::plain);
  add_errors(centred, h, v, o, out, &HeadSeries::centred);
  return out;
}

}  // namespace horner::diag

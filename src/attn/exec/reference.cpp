// The definition of every operator: each stage on whole [T, S] matrices, in the order of spec.h.
#include <ATen/ATen.h>

#include <cmath>

#include "attn/exec/exec.h"
#include "attn/stages.h"

namespace horner::attn::exec {

// The weights of every row, 0 where hidden. Exp subtracts the row's maximum and keeps it in
// `shift`: N and W are e^-shift times those of spec.h.
struct Weighed {
  const at::Tensor &x, &hidden;  // [B, H, T, S], [1 or B, 1, T, S]
  at::Tensor& shift;             // [..., T, 1]

  at::Tensor operator()(Exp) const {
    shift = x.masked_fill(hidden, -INFINITY).amax(-1, true).detach();
    shift = shift.masked_fill(shift == -INFINITY, 0);
    return (x - shift).masked_fill(hidden, -INFINITY).exp();
  }
  at::Tensor operator()(Taylor w) const {
    at::Tensor y = at::ones_like(x);
    for (int n = w.order; n > 0; --n) y = 1 + y * x / n;
    return y.masked_fill(hidden, 0);
  }
  at::Tensor operator()(Power w) const {
    at::Tensor y = at::ones_like(x);
    for (int n = w.degree; n > 0; --n) y = y * x / n;
    return y.masked_fill(hidden, 0);
  }
  at::Tensor operator()(Sigmoid) const { return x.sigmoid().masked_fill(hidden, 0); }
  at::Tensor operator()(TopK w) const {
    const at::Tensor y = x.masked_fill(hidden, -INFINITY);
    const int64_t k = std::min<int64_t>(w.k, y.size(-1));
    const at::Tensor least = std::get<0>(y.detach().topk(k, -1)).narrow(-1, k - 1, 1);
    const at::Tensor dropped = y < least;
    if (w.renormalise) return softmax(y.masked_fill(dropped, -INFINITY));
    return softmax(y).masked_fill(dropped, 0);
  }
  at::Tensor operator()(SelfAdjusted) const {
    const at::Tensor low = x.masked_fill(hidden, INFINITY).amin(-1, true).clamp_max(0);
    const at::Tensor high = x.masked_fill(hidden, -INFINITY).amax(-1, true).clamp_min(0);
    return (x - low) / (high - low + 1e-10) * softmax(x.masked_fill(hidden, -INFINITY));
  }
  // p = max((alpha - 1) x - tau, 0)^(1 / (alpha - 1)), with the tau for which the row sums to 1.
  at::Tensor operator()(Entmax w) const {
    const double a = w.alpha - 1.0;
    at::Tensor top = x.masked_fill(hidden, -INFINITY).amax(-1, true).detach();
    top = top.masked_fill(top == -INFINITY, 0);
    const at::Tensor y = ((x - top) * a).masked_fill(hidden, -INFINITY);
    auto p = [&](const at::Tensor& y, const at::Tensor& tau) {
      return (y - tau).clamp_min(0).pow(1 / a);
    };
    // tau is in [-1, 0]: at -1 the largest term alone is 1, at 0 every term is 0.
    const at::Tensor exact = y.detach().to(at::kDouble);
    at::Tensor low = at::full_like(top, -1, at::kDouble), high = at::zeros_like(low);
    for (int i = 0; i < 52; ++i) {
      const at::Tensor mid = (low + high) / 2, over = p(exact, mid).sum(-1, true) > 1;
      low = at::where(over, mid, low);
      high = at::where(over, high, mid);
    }
    // The row sums to 1 for every x, which gives the gradient of tau: tau - tau.detach() adds that
    // gradient and the value 0.
    const at::Tensor once = p(exact, low);
    const at::Tensor slope = once.pow(1 - a).masked_fill(once == 0, 0).to(y.scalar_type());
    const at::Tensor tau = (slope * y.masked_fill(y == -INFINITY, 0)).sum(-1, true) /
                           slope.sum(-1, true).clamp_min(1e-30);
    return p(y, low.to(y.scalar_type()) + tau - tau.detach());
  }

  // Softmax that gives zeros for a row of -inf.
  static at::Tensor softmax(const at::Tensor& y) {
    const at::Tensor none = y == -INFINITY;
    return y.masked_fill(none.all(-1, true), 0).softmax(-1).masked_fill(none, 0);
  }
};

// The scores with the sharpness that depends on them; `scale` of stages.h has the other kinds.
struct SharpenedByRow {
  const at::Tensor &x, &hidden;

  at::Tensor operator()(Flat) const { return x; }
  at::Tensor operator()(LogLength) const { return x; }
  at::Tensor operator()(LogPower) const { return x; }
  // A polynomial of the entropy of the row's softmax (arXiv 2410.01104).
  at::Tensor operator()(Adaptive) const {
    const at::Tensor p = Weighed::softmax(x.detach().masked_fill(hidden, -INFINITY));
    const at::Tensor H = -(p * (p + 1e-9).log()).sum(-1, true);
    at::Tensor beta = at::zeros_like(H);
    for (double c : {-0.037, 0.481, -2.3, 4.917, -1.791}) beta = beta * H + c;
    return x * at::where(H > 0.5, beta.clamp_min(1), 1).to(x.scalar_type());
  }
};

// The weights w times the decay of every t and s.
struct Decayed {
  const Inputs& in;  // one key head for each query head
  const at::Tensor &w, &hidden;
  at::TensorOptions whole = hidden.options().dtype(at::kLong);
  int64_t T = hidden.size(2), S = hidden.size(3);

  at::Tensor operator()(NoDecay) const { return w; }
  // e^(sum of the log gates over (s, t]), added up for every pair: a gate of 0, whose log is -inf,
  // hides the keys before it and leaves the others as they are.
  at::Tensor operator()(TokenGate) const {
    const at::Tensor next =
        at::constant_pad_nd(in.decay.to(at::kDouble).narrow(2, 1, S - 1), {0, 1});
    const at::Tensor t = at::arange(S - T, S, whole).unsqueeze(-1), s = at::arange(S, whole);
    const at::Tensor terms = next.unsqueeze(-2).where(s < t, 0);  // [B, H, T, S]
    return times_exp(terms.flip(-1).cumsum(-1).flip(-1));
  }
  at::Tensor operator()(HeadSlope) const {
    const at::Tensor t = at::arange(S - T, S, whole).unsqueeze(-1), s = at::arange(S, whole);
    const at::Tensor slope = in.slope.to(at::kDouble).clamp_max(1000);  // 0 * inf is NaN
    return times_exp(-slope.view({-1, 1, 1}) * (t - s));
  }
  at::Tensor times_exp(const at::Tensor& log) const {
    return w * log.masked_fill(hidden, 0).exp().to(w.scalar_type());
  }
};

// The values that the sum sees: [B, H, S, E].
struct Summed {
  const Spec& spec;
  const Inputs& in;
  at::Tensor v = spec.input_gate ? in.v * in.input_gate.unsqueeze(-1) : in.v;

  at::Tensor operator()(AsGiven) const { return v; }
  at::Tensor operator()(CountPower) const {
    Inputs at_keys = in;
    at_keys.q = in.k;
    const at::Tensor n = seen(spec.mask, at_keys).count.clamp_min(1);  // [1 or B, 1, S, 1]
    return (v / n.pow(in.count_exponent.sigmoid().view({-1, 1, 1}))).to(v.scalar_type());
  }
};

// From the weights [B, H, T, S]; `first` [T] is the first key of each row.
static Statistics statistics_of(const at::Tensor& weights, const at::Tensor& first) {
  const at::Tensor w = weights.detach(), a = w.abs(), p = a / a.sum(-1, true).clamp_min(1e-30);
  const at::Tensor at_first =
      p.gather(-1, first.view({1, 1, -1, 1}).expand({p.size(0), p.size(1), p.size(2), 1}));
  return {-at::xlogy(p, p).sum(-1), p.amax(-1), at_first.squeeze(-1),
          p.masked_fill(w >= 0, 0).sum(-1)};
}

static at::Tensor run(const Spec& spec, const Inputs& given, Statistics* statistics) {
  Inputs in = given;
  in.q = mapped(spec.features, given.q, given.query_projection);
  in.k = mapped(spec.features, given.k, given.key_projection, in.q.size(1) / in.k.size(1));
  in = one_key_head_each(in);
  const auto [hidden, count] = seen(spec.mask, in);

  // [B, H, T, S]; for 16-bit inputs, the two products are in their dtype, the rest in float32
  at::Tensor x = at::matmul(in.q, in.k.transpose(-1, -2)).to(count.scalar_type());
  x = x * scale(spec, given, count);
  at::Tensor shift, w = weights(spec, x, {hidden, count}, shift);
  w = std::visit(Decayed{in, w, hidden}, spec.decay);
  if (statistics) *statistics = statistics_of(w, intervals(spec.mask, given).first);
  const at::Tensor v = std::visit(Summed{spec, in}, spec.values);
  // weights that are not divided yet overflow float16
  const auto dtype = v.scalar_type() == at::kHalf ? at::kFloat : v.scalar_type();
  const at::Tensor N = at::matmul(w.to(dtype), v.to(dtype)).to(w.scalar_type());
  Sums sums{N, w.sum(-1, true), shift, count, {}};
  if (in.denominator_gate.defined())
    sums.gates = in.denominator_gate.exp().unsqueeze(-2).masked_fill(hidden, 0).sum(-1, true);
  return finish(spec, given, sums);
}

const Execution reference{
    .name = "reference",
    .about = "the definition; builds the T x S matrix",
    .why_not = [](const Spec&, const Inputs&) { return std::string(); },
    .run = run,
};

}  // namespace horner::attn::exec

namespace horner::attn {

at::Tensor weights(const Spec& spec, at::Tensor x, const Seen& seen, at::Tensor& shift) {
  using namespace exec;
  x = std::visit(SharpenedByRow{x, seen.hidden}, spec.sharpness);
  if (spec.centred) x = x - x.masked_fill(seen.hidden, 0).sum(-1, true) / seen.count.clamp_min(1);
  if (spec.less_log_count) x = x - seen.count.clamp_min(1).log();
  x = x.clamp_max(spec.clamp);
  shift = at::zeros({1}, x.options());
  return std::visit(Weighed{x, seen.hidden, shift}, spec.weight);
}

}  // namespace horner::attn

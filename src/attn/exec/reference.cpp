// The definition of every operator: each stage on whole [T, S] matrices, in the order of spec.h.
#include <ATen/ATen.h>

#include <cmath>

#include "attn/dropout.h"
#include "attn/exec/delta.h"
#include "attn/exec/exec.h"
#include "attn/inputs.h"
#include "attn/stages.h"

namespace horner::attn::exec {

// The weights of every row, 0 where hidden. Exp subtracts the row's maximum and keeps it in
// `shift`: N and W are e^-shift times those of spec.h.
struct Weighed {
  const at::Tensor &x, &hidden;  // [B, H, T, S], [1 or B, 1, T, S]
  at::Tensor& shift;             // [..., T, 1]
  at::Tensor& summed;            // [B, H, T, S], what W sums where that is not the weights

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
  at::Tensor operator()(Softpick) const {
    shift = x.masked_fill(hidden, -INFINITY).amax(-1, true).detach().clamp_min(0);
    const at::Tensor none =
        (-shift).exp();  // a hidden score may overflow: it is left out before exp
    const at::Tensor y =
        ((x - shift).masked_fill(hidden, -INFINITY).exp() - none).masked_fill(hidden, 0);
    summed = y.abs();
    return y.clamp_min(0);
  }
  at::Tensor operator()(StickBreaking) const {
    const at::Tensor kept = at::log_sigmoid(-x).masked_fill(hidden, 0);  // of each key's stick
    const at::Tensor after = kept.flip(-1).cumsum(-1).flip(-1) - kept;
    return (at::log_sigmoid(x) + after).masked_fill(hidden, -INFINITY).exp();
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
    // The row sums to 1 for every x, which gives the gradients of tau: a step of Newton's method
    // from there has the value of tau and its first gradient, two steps have its second one too.
    const auto newton = [&](const at::Tensor& tau) {
      const at::Tensor z = (y - tau).clamp_min(0);
      const at::Tensor slope = (z.pow(1 / a - 1) / a).masked_fill(z == 0, 0).sum(-1, true);
      const at::Tensor nothing = slope.detach() == 0;
      return tau + (z.pow(1 / a).sum(-1, true) - 1).masked_fill(nothing, 0) /
                       slope.masked_fill(nothing, 1);
    };
    const at::Tensor root = low.to(y.scalar_type()), tau = newton(newton(root));
    return p(y, root + tau - tau.detach());
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

// The log of the decay of every t and s, [B or 1, H, T, S] in double, 0 where hidden; undefined for
// none.
struct LogDecay {
  const Inputs& in;  // one key head for each query head
  const at::Tensor& hidden;
  at::TensorOptions whole = hidden.options().dtype(at::kLong);
  int64_t T = hidden.size(2), S = hidden.size(3);

  at::Tensor operator()(NoDecay) const { return {}; }
  // The sum of the log gates over (s, t], added up for every pair: a gate of 0, whose log is -inf,
  // hides the keys before it and leaves the others as they are.
  at::Tensor operator()(TokenGate) const {
    const at::Tensor next =
        at::constant_pad_nd(in.decay.to(at::kDouble).narrow(2, 1, S - 1), {0, 1});
    const at::Tensor t = at::arange(S - T, S, whole).unsqueeze(-1), s = at::arange(S, whole);
    const at::Tensor terms = next.unsqueeze(-2).where(s < t, 0);  // [B, H, T, S]
    return terms.flip(-1).cumsum(-1).flip(-1).masked_fill(hidden, 0);
  }
  at::Tensor operator()(HeadSlope) const {
    const at::Tensor t = at::arange(S - T, S, whole).unsqueeze(-1), s = at::arange(S, whole);
    const at::Tensor slope = in.slope.to(at::kDouble).clamp_max(1000);  // 0 * inf is NaN
    return (-slope.view({-1, 1, 1}) * (t - s)).masked_fill(hidden, 0);
  }
  at::Tensor operator()(ChannelGate) const { return {}; }  // part of the products
};

// q.k of every pair, each channel times its decay: [B, H, T, S].
static at::Tensor products(const Spec& spec, const Inputs& in) {
  if (!is<ChannelGate>(spec.decay) || in.q.size(2) == 0)
    return at::matmul(in.q, in.k.transpose(-1, -2));
  // A few queries at a time: e^(sum of the log gates over (s, t]) of every key and channel.
  const int64_t T = in.q.size(2), S = in.k.size(2);
  const auto dtype = wide(in.q.scalar_type());
  const at::Tensor next =
      at::constant_pad_nd(in.channel_decay.to(at::kDouble).narrow(2, 1, S - 1), {0, 0, 0, 1});
  const auto whole = in.q.options().dtype(at::kLong);
  const at::Tensor s = at::arange(S, whole).unsqueeze(-1);
  constexpr int64_t kNumbers = 1 << 21;
  const int64_t few = std::clamp<int64_t>(kNumbers / std::max<int64_t>(1, next.numel()), 1, T);
  std::vector<at::Tensor> rows;
  for (int64_t t = 0; t < T; t += few) {
    const int64_t n = std::min(few, T - t), p = t + S - T;
    const at::Tensor past = s < at::arange(p, p + n, whole).view({n, 1, 1});  // [n, S, 1]
    const at::Tensor terms = next.unsqueeze(2).where(past, 0);                // [B, H, n, S, D]
    const at::Tensor decay = terms.flip(3).cumsum(3).flip(3).exp().to(dtype);
    const at::Tensor q = in.q.narrow(2, t, n).unsqueeze(3).to(dtype);
    rows.push_back((q * decay * in.k.unsqueeze(2).to(dtype)).sum(-1));
  }
  return at::cat(rows, 2);
}

// The weights times the decay of every query and key: [B, H, T, S].
struct Rows {
  at::Tensor w, summed, shift;  // `summed`: what W sums

  // `near`: the scaled products of near keys where they are not those of the others.
  Rows(const Spec& spec, const Inputs& in, const Seen& seen, const at::Tensor& scale,
       const at::Tensor& near = {}) {
    // for 16-bit inputs, the two products are in their dtype, the rest in float32
    const at::Tensor x = products(spec, in).to(seen.count.scalar_type()) * scale;
    at::Tensor log = std::visit(LogDecay{in, seen.hidden}, spec.decay);
    if (log.defined()) log = log.masked_fill(log < kNoDecayLeft, -INFINITY);
    // exp has the decay in its scores, so that the largest weight of a row is 1
    const bool near_keys = !is<NoKeys>(spec.near);
    const bool within = log.defined() && (near_keys ? !spec.near_share : is<Exp>(spec.weight));
    w = weights(spec, x, seen, shift, {in.bias, near, within ? log : at::Tensor(), in.near_share},
                &summed);
    if (log.defined() && !within) {
      const at::Tensor decay = log.exp().to(w.scalar_type());
      w = w * decay;
      if (summed.defined()) summed = summed * decay;
    }
    if (!summed.defined()) summed = w;
  }
};

// What near keys are scored by where the others are by features: q.k as softmax has it.
static at::Tensor near_products(const Spec& spec, const Inputs& given, const Seen& seen) {
  if (is<NoKeys>(spec.near) || is<Identity>(spec.features)) return {};
  const Inputs in = one_key_head_each(given);
  const double scale = scale_factor({.temperature = spec.temperature}, given);
  return at::matmul(in.q, in.k.transpose(-1, -2)).to(seen.count.scalar_type()) * scale;
}

at::Tensor key_rows(const Spec& spec, const Inputs& in, double scale, int64_t from, int64_t to,
                    at::Tensor& shift) {
  Inputs keys = tokens(in, 0, to);
  keys.q = in.k.narrow(2, from, to - from);
  const Seen seen = attn::seen(spec.mask, keys);
  const Rows rows(spec, keys, seen, at::scalar_tensor(scale, seen.count.options()));
  shift = rows.shift;
  return rows.w;
}

// The values that the sum sees: [B, H, S, E].
struct Summed {
  const Spec& spec;
  const Inputs& in;
  static constexpr double kTiny = 1e-6;
  at::Tensor v = spec.input_gate ? in.v * in.input_gate.unsqueeze(-1) : in.v;

  at::Tensor operator()(AsGiven) const { return v; }
  // (1 + A) u = B v, A the strictly lower triangle of B w(k.k) decay and B = b / w of a key and
  // itself: the solution is found token after token.
  at::Tensor operator()(Delta d) const {
    Inputs keys = in;
    keys.q = in.k;
    const Seen seen = attn::seen(spec.mask, keys);
    const at::Tensor scale = at::scalar_tensor(scale_factor(spec, in), seen.count.options());
    const Rows rows(spec, keys, seen, scale);
    const at::Tensor own = rows.w.diagonal(0, -2, -1).unsqueeze(-1);  // [B, H, S, 1]
    const at::Tensor nothing = own.detach().abs() < kTiny;
    const at::Tensor b = d.most * in.beta.unsqueeze(-1).to(own.scalar_type());
    const at::Tensor B = (b / own.masked_fill(nothing, 1)).masked_fill(nothing, 0);
    const at::Tensor A = (B * rows.w).tril(-1);
    const at::Tensor given = B * (-rows.shift).exp() * v.to(A.scalar_type());
    const at::Tensor u = at::linalg_solve_triangular(A, given, /*upper=*/false, /*left=*/true,
                                                     /*unitriangular=*/true);
    return u.to(v.scalar_type());
  }
  at::Tensor operator()(CountPower) const {
    Inputs at_keys = in;
    at_keys.q = in.k;
    const at::Tensor n = seen(spec.mask, at_keys).count.clamp_min(1);  // [1 or B, 1, S, 1]
    const at::Tensor exponent = in.count_exponent.sigmoid().view({-1, 1, 1});
    return (v / count_power(n, exponent)).to(v.scalar_type());
  }
};

// From the weights [B, H, T, S]; `first` [T] is the first key of each row.
static Statistics statistics_of(const at::Tensor& weights, const at::Tensor& first) {
  const at::Tensor w = weights.detach(), a = w.abs(), p = a / a.sum(-1, true).clamp_min(1e-30);
  const at::Tensor at_first =
      p.gather(-1, first.view({1, 1, -1, 1}).expand({p.size(0), p.size(1), p.size(2), 1}));
  return {-at::xlogy(p, p).sum(-1),
          p.amax(-1),
          at_first.squeeze(-1),
          p.masked_fill(w >= 0, 0).sum(-1),
          {}};
}

// The weights [B, H, T, S] after dropout: dropout.h in torch's operators, where integers of 64 bits
// have a sign and shifts keep it.
static at::Tensor dropped(double p, const at::Tensor& seed, const at::Tensor& w) {
  constexpr int64_t kWord = 0xFFFFFFFF;
  constexpr auto kGolden = int64_t(0x9E3779B97F4A7C15);
  const auto right = [](const at::Tensor& x, int n) {
    return x.bitwise_right_shift(n).bitwise_and((int64_t(1) << (64 - n)) - 1);
  };
  const auto mixed = [&](at::Tensor x) {
    x = x.bitwise_xor(right(x, 30)) * int64_t(0xBF58476D1CE4E5B9);
    x = x.bitwise_xor(right(x, 27)) * int64_t(0x94D049BB133111EB);
    return x.bitwise_xor(right(x, 31));
  };
  const auto whole = seed.options();
  const at::Tensor b = at::arange(w.size(0), whole).view({-1, 1, 1, 1});
  const at::Tensor h = at::arange(w.size(1), whole).view({-1, 1, 1});
  const at::Tensor t = at::arange(w.size(2), whole).view({-1, 1}), s = at::arange(w.size(3), whole);
  const at::Tensor head = mixed(mixed(seed + kGolden) + (b * (int64_t(1) << 32) + h) * kGolden);
  const at::Tensor row = mixed(head + (t + 1) * kGolden);
  const at::Tensor first = row.bitwise_and(kWord), second = right(row, 32);
  at::Tensor x = (s + first).bitwise_and(kWord);
  x = (x.bitwise_xor(right(x, 16)) * int64_t(kDropoutMix1)).bitwise_and(kWord);
  x = ((x.bitwise_xor(right(x, 13)) + second) * int64_t(kDropoutMix2)).bitwise_and(kWord);
  x = x.bitwise_xor(right(x, 16));
  return (w / (1 - p)).masked_fill(x < int64_t(dropped_below(p)), 0);
}

static at::Tensor run(const Spec& spec, const Inputs& given, Statistics* statistics) {
  if (given.k.size(2) == 0) return without_keys(given, statistics);
  Inputs in = given;
  in.q = mapped(spec.features, given.q, given.query_projection);
  in.k = mapped(spec.features, given.k, given.key_projection, in.q.size(1) / in.k.size(1));
  in = one_key_head_each(in);
  const Seen keys = seen(spec.mask, in);
  const auto& [w, summed, shift] =
      Rows(spec, in, keys, scale(spec, given, keys.count), near_products(spec, given, keys));
  if (statistics && !statistics->only_log_sum)
    *statistics = statistics_of(w, first_keys(spec.mask, given));
  const at::Tensor v = std::visit(Summed{spec, in}, spec.values);
  // weights that are not divided yet overflow float16
  const auto dtype = v.scalar_type() == at::kHalf ? at::kFloat : v.scalar_type();
  const at::Tensor left = spec.dropout == 0 ? w : dropped(spec.dropout, in.seed, w);
  const at::Tensor N = at::matmul(left.to(dtype), v.to(dtype));
  Sums sums{N.to(w.scalar_type()),     summed.sum(-1, true), shift, keys.count, {},
            far_keys(spec, keys).count};
  if (statistics && is<Exp>(spec.weight)) statistics->log_sum = log_sum(sums);
  if (in.denominator_gate.defined())
    sums.gates = in.denominator_gate.exp().unsqueeze(-2).masked_fill(keys.hidden, 0).sum(-1, true);
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

static at::Tensor mean_score(const at::Tensor& x, const Seen& keys) {
  return x.masked_fill(keys.hidden, 0).sum(-1, true) / keys.count.clamp_min(1);
}

at::Tensor scores(const Spec& spec, at::Tensor x, const Seen& seen, const at::Tensor& bias) {
  x = std::visit(exec::SharpenedByRow{x, seen.hidden}, spec.sharpness);
  if (spec.softcap != 0) x = spec.softcap * (x / spec.softcap).tanh();
  if (spec.bias) x = x + bias.to(x.scalar_type());
  if (spec.centred) x = x - mean_score(x, far_keys(spec, seen));
  if (spec.less_log_count) x = x - seen.count.clamp_min(1).log();
  return x.clamp_max(spec.clamp);
}

// Near keys have exp, the others their weight, both times their decay and e^-shift: the largest
// near score with its decay, and not below 0 where there are others. With a share the largest near
// score, without its decay, is not a shift but part of the near weights.
static at::Tensor near_and_far(const Spec& spec, const at::Tensor& x, const at::Tensor& x_near,
                               const Besides& besides, const Seen& seen, at::Tensor& shift) {
  const at::Tensor not_far = far_keys(spec, seen).hidden;
  const at::Tensor not_near = seen.hidden.logical_or(not_far.logical_not());
  at::Tensor unused, none;
  if (spec.near_share) {
    const at::Tensor y = x_near.masked_fill(not_near, -INFINITY);
    const at::Tensor largest = y.amax(-1, true), any = largest != -INFINITY;
    const at::Tensor near = (y - at::where(any, largest, 0)).exp();
    return near * besides.near_share.to(x.scalar_type()).sigmoid().view({-1, 1, 1}) +
           std::visit(exec::Weighed{x, not_far, unused, none}, spec.weight);
  }
  const at::Tensor log = besides.log_decay.defined() ? besides.log_decay.to(x.scalar_type())
                                                     : at::zeros({1}, x.options());
  const at::Tensor y = x_near + log;
  exec::Weighed{y, not_near, shift, none}(Exp{});
  shift = at::where(not_far.all(-1, true), shift, shift.clamp_min(0));
  const at::Tensor exact = (y - shift).masked_fill(not_near, -INFINITY).exp();
  const at::Tensor far =
      std::visit(exec::Weighed{x, not_far, unused, none}, spec.weight) * log.exp();
  return exact + far * (-shift).exp().masked_fill(not_far.all(-1, true), 0);
}

at::Tensor weights(const Spec& spec, const at::Tensor& products, const Seen& seen,
                   at::Tensor& shift, const Besides& besides, at::Tensor* summed) {
  at::Tensor x = scores(spec, products, seen, besides.bias);
  shift = at::zeros({1}, x.options());
  at::Tensor other;
  at::Tensor& sum = summed ? *summed : other;
  if (!is<NoKeys>(spec.near)) {
    at::Tensor near = besides.near.defined() ? besides.near : x;
    if (spec.centred && besides.near.defined())
      near = near - mean_score(products, far_keys(spec, seen));
    return near_and_far(spec, x, near, besides, seen, shift);
  }
  if (besides.log_decay.defined()) x = x + besides.log_decay.to(x.scalar_type());
  return std::visit(exec::Weighed{x, seen.hidden, shift, sum}, spec.weight);
}

}  // namespace horner::attn

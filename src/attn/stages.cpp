#include "attn/stages.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/inputs.h"
#include "attn/plan.h"
#include "core/check.h"

namespace horner::attn {

at::ScalarType wide(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}
at::Tensor plain(const at::Tensor& x) {
  return x.defined() ? x.to(at::kFloat).contiguous() : x;
}
at::Tensor sink_of_rows(const Inputs& in) {
  if (!in.sink.defined()) return {};
  return plain(in.sink.view({1, -1, 1}).expand({in.q.size(0), in.q.size(1), in.q.size(2)}));
}

Inputs one_key_head_each(Inputs in) {
  const int64_t H = in.q.size(1), G = in.k.size(1);
  if (G == H) return in;
  for (const Input& i : input_table()) {
    const int64_t axis = axis_of(i, "G");
    at::Tensor& x = in.*i.at;
    if (axis >= 0 && x.defined()) x = x.repeat_interleave(H / G, axis);
  }
  return in;
}

// Lengths along an axis. Torch's second derivative of a length of 0 is NaN; here it is 0.
static at::Tensor lengths(const at::Tensor& x, int64_t axis) {
  const at::Tensor all = x.norm(2, axis, true), zero = all.detach() == 0;
  if (zero.is_cpu() && !is_transformed(zero) && !zero.any().item<bool>()) return all;
  return x.masked_fill(zero, 1).norm(2, axis, true).masked_fill(zero, 0);
}

struct Mapped {
  const at::Tensor &x, &projection;  // [B, H, T, D], [H, D, F]
  int64_t repeats;

  at::Tensor operator()(Identity) const { return x; }
  at::Tensor operator()(Elu1) const { return at::elu(x) + 1; }
  at::Tensor operator()(Relu) const { return at::relu(x); }
  at::Tensor operator()(Cosine f) const {
    const double all = f.over_heads ? std::sqrt(double(repeats)) : 1;
    const at::Tensor y = x.stride(-1) == 0 ? x.contiguous() : x;  // summed in one order
    return y / (lengths(y, f.over_heads ? 1 : -1) * all).clamp_min(1e-12);
  }
  at::Tensor operator()(Project) const { return at::matmul(x, projection.to(x.scalar_type())); }
  at::Tensor operator()(Hedgehog) const {
    const at::Tensor y = (*this)(Project{}).to(wide(x.scalar_type()));
    return at::cat({y.softmax(-1), (-y).softmax(-1)}, -1).to(x.scalar_type());
  }
};

at::Tensor mapped(const Features& f, const at::Tensor& x, const at::Tensor& projection,
                  int64_t repeats) {
  return std::visit(Mapped{x, projection, repeats}, f);
}

static at::Tensor whole_cuts(at::Tensor cuts, int64_t last) {
  if (!cuts.is_cpu()) {  // which no check has read: kernels index by what they are made into here
    cuts = std::get<0>(cuts.clamp(0, last).cummax(0));
    cuts.narrow(0, 0, 1).fill_(0), cuts.narrow(0, cuts.numel() - 1, 1).fill_(last);
  }
  return cuts.to(at::kInt).contiguous();
}

// The end of each query's packed sequence, and its number, from 1.
static std::pair<at::Tensor, at::Tensor> query_sequences(const Inputs& in) {
  const int64_t T = in.q.size(2);
  const at::Tensor cuts = whole_cuts(in.cu_seqlens, T), t = at::arange(T, cuts.options());
  const at::Tensor next = at::searchsorted(cuts, t, /*out_int32=*/false, /*right=*/true);
  return {cuts.index_select(0, next), next};
}

std::pair<at::Tensor, at::Tensor> sequences(const Inputs& in) {
  const at::Tensor next = query_sequences(in).second;
  const bool own = in.cu_seqlens_k.defined();
  const at::Tensor cuts = whole_cuts(own ? in.cu_seqlens_k : in.cu_seqlens, in.k.size(2));
  return {cuts.index_select(0, next - 1), cuts.index_select(0, next)};
}

std::pair<at::Tensor, at::Tensor> intervals(const Mask& mask, const Inputs& in) {
  const int64_t T = in.q.size(2), S = in.k.size(2);
  const Reach r = reach(mask);
  at::Tensor past = at::arange(S - T + 1, S + 1, in.q.options().dtype(at::kLong));  // p + 1
  at::Tensor begin = at::zeros({1}, past.options()), end = at::full({1}, S, past.options());
  if (in.cu_seqlens.defined()) std::tie(begin, end) = sequences(in);
  if (in.cu_seqlens_k.defined())  // the last query of a sequence stands at the last of its keys
    past = past + (T - S) + (end - query_sequences(in).first);
  at::Tensor lo = at::maximum(past - r.back, begin);
  if (r.chunk > 0) lo = begin + (past - 1 - begin).div(r.chunk, "floor").clamp_min(0) * r.chunk;
  const at::Tensor hi = at::minimum(at::maximum(past + r.ahead, begin), end);
  return {lo.to(at::kLong), hi.to(at::kLong)};
}

at::Tensor first_keys(const Mask& mask, const Inputs& in) {
  const at::Tensor lo = intervals(mask, in).first;
  if (is_interval(mask)) return lo;
  return in.cu_seqlens.defined() ? sequences(in).first.to(at::kLong) : at::zeros_like(lo);
}

KeysSeen keys_seen(const Mask& mask, const Inputs& in) {
  const auto [lo, hi] = intervals(mask, in);
  KeysSeen k{lo, hi, {}, {}};
  if (in.prefix.defined()) {
    const at::Tensor end = in.prefix.to(at::kLong).clamp(0, in.k.size(2)).unsqueeze(1);
    k.hi = at::maximum(hi, end).contiguous();
  }
  if (const int first = reach(mask).first; first > 0) {
    k.from = first_keys(mask, in);
    const at::Tensor end = k.from + first, joined = lo <= end;  // one interval
    k.lo = at::where(joined, k.from, lo), k.to = at::where(joined, k.from, end);
  }
  return k;
}

at::Tensor sums_over_keys(const KeysSeen& keys, const at::Tensor& x) {
  const at::Tensor running = at::constant_pad_nd(x.to(at::kDouble).cumsum(-2), {0, 0, 1, 0});
  const auto until = [&](const at::Tensor& s) {
    if (s.dim() == 1) return running.index_select(-2, s);
    return at::take_along_dim(running, s.to(at::kLong).view({s.size(0), 1, -1, 1}), -2);
  };
  const at::Tensor sums = until(keys.hi) - until(at::minimum(keys.lo, keys.hi));
  return keys.from.defined() ? sums + until(keys.to) - until(keys.from) : sums;
}

Seen seen(const Mask& mask, const Inputs& in) {
  const int64_t T = in.q.size(2), S = in.k.size(2);
  const at::Tensor s = at::arange(S, in.q.options().dtype(at::kLong)).unsqueeze(0);
  const auto [lo, hi] = intervals(mask, in);
  at::Tensor hidden = (s < lo.unsqueeze(1)).logical_or(s >= hi.unsqueeze(1)).expand({1, 1, T, S});
  if (const int first = reach(mask).first; first > 0) {
    const at::Tensor begin = first_keys(mask, in).unsqueeze(1);
    hidden = hidden.logical_and(
        (s < begin).logical_or(s >= begin + first).logical_or(s >= hi.unsqueeze(1)));
  }
  if (in.prefix.defined()) hidden = hidden.logical_and(s >= in.prefix.view({-1, 1, 1, 1}));
  if (in.keep.defined()) hidden = hidden.logical_or(in.keep.logical_not().view({-1, 1, 1, S}));
  return {hidden, hidden.logical_not().sum(-1, true).to(wide(in.q.scalar_type()))};
}

Seen far_keys(const Spec& spec, const Seen& seen) {
  const auto* near = std::get_if<Window>(&spec.near);
  if (!near) return seen;
  const int64_t T = seen.hidden.size(-2), S = seen.hidden.size(-1);
  const at::Tensor s = at::arange(S, seen.hidden.options().dtype(at::kLong));
  const at::Tensor p = at::arange(S - T, S, s.options()).unsqueeze(-1);
  const at::Tensor hidden = seen.hidden.logical_or(s > p - near->size);
  return {hidden, hidden.logical_not().sum(-1, true).to(seen.count.scalar_type())};
}

struct LogGates {
  const Inputs& in;

  at::Tensor operator()(ChannelGate) const { return {}; }  // not of whole tokens
  at::Tensor operator()(NoDecay) const { return {}; }
  // e^1000 is inf and e^-1000 is 0 in every dtype. Larger logs, such as that of a gate of 0, would
  // leave no digits of the others in running sums, or inf - inf.
  at::Tensor operator()(TokenGate) const { return in.decay.clamp(-1000, 1000); }
  at::Tensor operator()(HeadSlope) const {
    const int64_t B = in.k.size(0), G = in.k.size(1), S = in.k.size(2);
    return -in.slope.clamp(-1000, 1000).view({1, G, 1}).expand({B, G, S});
  }
};

at::Tensor log_gates(const Decay& decay, const Inputs& in) {
  return std::visit(LogGates{in}, decay);
}

Inputs without_idle_gates(Inputs in, const at::Tensor& before) {
  for (at::Tensor* x : {&in.decay, &in.channel_decay}) {
    if (!x->defined()) continue;
    const at::Tensor seen =
        in.keep.defined() ? in.keep : at::ones({1, x->size(2)}, x->options().dtype(at::kBool));
    at::Tensor n = seen.cumsum(1) - seen.to(at::kLong);  // [1 or B, S], keys before each
    if (before.defined()) n = n + before.unsqueeze(1);
    const at::Tensor idle = n.eq(0).unsqueeze(1);
    *x = x->masked_fill(x->isnan().logical_and(x->dim() == 4 ? idle.unsqueeze(-1) : idle), 0);
  }
  return in;
}

at::Tensor channel_logs(const Inputs& in) {
  return in.channel_decay.to(at::kDouble).clamp_min(-1000);
}

at::Tensor key_shares(const Spec& spec, const Inputs& in, const at::Tensor& keys) {
  constexpr double kTiny = 1e-6;
  // in double: a key of length 1 gives 1
  const at::Tensor x = scale_factor(spec, in) * keys.to(at::kDouble).square().sum(-1, true);
  at::Tensor hidden = at::zeros({1, 1, x.size(2), 1}, x.options().dtype(at::kBool)), shift;
  if (in.keep.defined()) hidden = in.keep.logical_not().view({-1, 1, x.size(2), 1});
  const at::Tensor own = weights(spec, x, {hidden, at::Tensor()}, shift).squeeze(-1);
  const at::Tensor nothing = own.detach().abs() < kTiny;
  const at::Tensor b = std::get<Delta>(spec.values).most * in.beta.to(own.scalar_type());
  return (b / own.masked_fill(nothing, 1)).masked_fill(nothing, 0).to(keys.scalar_type());
}

// The number of keys that each key's position sees: [1 or B, 1, S], in double.
static at::Tensor seen_by_keys(const Mask& mask, Inputs in, const at::Tensor& before) {
  in.q = in.k;
  const auto [lo, hi] = intervals(mask, in);
  at::Tensor count = (hi - lo).view({1, 1, -1}).to(at::kDouble);
  if (in.keep.defined()) {
    const at::Tensor kept = in.keep.to(at::kDouble).cumsum(-1).unsqueeze(1);
    const at::Tensor running = at::constant_pad_nd(kept, {1, 0});
    count = running.index_select(-1, hi) - running.index_select(-1, lo);
  }
  if (!before.defined()) return count;
  check(sees_all_past(mask) || !in.keep.defined(),
        "a stream with values=count_power supports no padding (keep) under a window mask");
  count = count + before.view({-1, 1, 1});
  return sees_all_past(mask) ? count : count.clamp_max(reach(mask).back);
}

at::Tensor count_power(const at::Tensor& count, const at::Tensor& exponent) {
  return count.pow(exponent) + 0 * exponent;  // 1 to the power of NaN is 1
}

struct ValueGates {
  const Spec& spec;
  const Inputs& in;
  const at::Tensor& before;

  at::Tensor operator()(AsGiven) const { return spec.input_gate ? in.input_gate : at::Tensor(); }
  at::Tensor operator()(Delta) const { return (*this)(AsGiven{}); }
  at::Tensor operator()(CountPower) const {
    // An exponent in 16 bits would be wrong by the same factor in every row.
    const at::ScalarType dtype = wide(in.q.scalar_type());
    const at::Tensor exponent = in.count_exponent.to(dtype).sigmoid().view({1, -1, 1});
    const at::Tensor count = seen_by_keys(spec.mask, in, before).clamp_min(1);
    const at::Tensor gate = count_power(count.to(dtype), -exponent).expand({in.k.size(0), -1, -1});
    return spec.input_gate ? gate * in.input_gate : gate;
  }
};

at::Tensor value_gates(const Spec& spec, const Inputs& in, const at::Tensor& before) {
  return std::visit(ValueGates{spec, in, before}, spec.values);
}

std::pair<Spec, Inputs> with_value_gates(const Spec& spec, const Inputs& in,
                                         const at::Tensor& before) {
  std::pair<Spec, Inputs> to{spec, in};
  if (!is<CountPower>(spec.values)) return to;
  to.second.input_gate = value_gates(spec, in, before), to.second.count_exponent = at::Tensor();
  to.first.input_gate = true, to.first.values = AsGiven{};
  return to;
}

struct Sharpened {
  const Inputs& in;
  at::Tensor log_count;  // [..., T, 1]

  at::Tensor operator()(Flat) const { return at::ones({}, log_count.options()); }
  at::Tensor operator()(Adaptive) const { return at::ones({}, log_count.options()); }
  at::Tensor operator()(LogLength) const { return in.length_scale.view({-1, 1, 1}) * log_count; }
  at::Tensor operator()(LogPower) const {
    auto learned = [&](int64_t i) { return in.log_power.select(1, i).view({-1, 1, 1}); };
    const at::Tensor none = log_count == 0;  // of one key: 0 to a power has no second gradient
    return learned(0) +
           learned(1) * log_count.masked_fill(none, 1).pow(learned(2)).masked_fill(none, 0);
  }
};

struct ScaleFactor {
  double D;  // channels of f(q)

  double operator()(RootDim) const { return 1 / std::sqrt(D); }
  double operator()(Fixed s) const { return s.factor; }
};

double scale_factor(const Spec& spec, const Inputs& in) {
  const auto D = double(mapped_channels(spec, in.q.size(-1)));
  return std::visit(ScaleFactor{D}, spec.scale) / spec.temperature;
}

at::Tensor scale(const Spec& spec, const Inputs& in, const at::Tensor& count) {
  return scale_factor(spec, in) *
         std::visit(Sharpened{in, count.clamp_min(1).log()}, spec.sharpness);
}

at::Tensor log_count(const at::Tensor& count, const Inputs& in) {
  const at::Tensor log = count.clamp_min(1).log().squeeze(-1);
  return log.expand({in.q.size(0), in.q.size(1), in.q.size(2)});
}

at::Tensor statistics_memory(const Inputs& in, Statistics* to) {
  if (!to || to->only_log_sum) return {};
  const at::Tensor all =
      at::empty({4, in.q.size(0), in.q.size(1), in.q.size(2)}, in.q.options().dtype(at::kFloat));
  *to = {all.select(0, 0), all.select(0, 1), all.select(0, 2), all.select(0, 3), {}};
  return all;
}

at::Tensor log_sum_memory(const Inputs& in) {
  return at::empty({in.q.size(0), in.q.size(1), in.q.size(2)}, in.q.options().dtype(at::kFloat));
}

void add_query_decay(const at::Tensor& d_decay, const at::Tensor& d_query) {
  const int64_t G = d_decay.size(1), S = d_decay.size(2), T = d_query.size(2), n = std::min(T, S);
  const at::Tensor per_key_head = d_query.view({d_query.size(0), G, d_query.size(1) / G, T}).sum(2);
  d_decay.narrow(2, S - n, n) += per_key_head.narrow(2, T - n, n);
}

// A result that stands for e^shift times o.
struct Scaled {
  at::Tensor o;      // [B, H, T, E]
  at::Tensor shift;  // [B, H, T, 1], or [1] of zero
};

struct Divided {
  const Inputs& in;
  const Sums& sums;

  Scaled operator()(Nothing) const { return {sums.N, sums.shift}; }
  Scaled operator()(Count) const { return {sums.N / sums.count.clamp_min(1), sums.shift}; }
  Scaled operator()(CumulativeGate z) const {
    at::Tensor Z = sums.gates.clamp_min(z.least == 0 ? kTiny : z.least);
    if (z.times_count) Z = Z * sums.count.clamp_min(1);
    return {sums.N / Z, sums.shift};
  }
  // The shift cancels between N and W; plus and least are scaled by e^-shift as they are.
  Scaled operator()(Sum z) const {
    if (z.sink) return with_sink(z);
    at::Tensor Z = sums.W;
    if (z.plus != 0) Z = Z + z.plus * (-sums.shift).exp();
    if (z.least != 0) Z = at_least(Z, z.least * (-sums.shift).exp());
    if (z.floor != 0)
      Z = at_least(Z, z.floor * (sums.far.defined() ? sums.far : sums.count) * (-sums.shift).exp());
    if (z.detach) Z = Z.detach();
    const at::Tensor tiny = at::where(Z.detach() < 0, -kTiny, kTiny).to(Z.scalar_type());
    // Multiplying by 1 / Z takes one pass less in backward than dividing.
    const at::Tensor per_Z = at::where(Z.detach().abs() < kTiny, tiny, Z).reciprocal();
    return {sums.N * per_Z, at::zeros({1}, sums.shift.options())};
  }

  // Relative to the larger of the row's shift and the sink, so that neither overflows.
  Scaled with_sink(Sum z) const {
    const at::Tensor sink = in.sink.to(sums.W.scalar_type()).view({-1, 1, 1});  // [H, 1, 1]
    const at::Tensor above = (sink.detach() - sums.shift).clamp_min(0);
    Sums all = sums;
    all.N = sums.N * (-above).exp(), all.shift = sums.shift + above;
    all.W = sums.W * (-above).exp() + (sink - all.shift).exp();
    z.sink = false;
    return Divided{in, all}(z);
  }

  // The gradient goes to Z where both are equal.
  static at::Tensor at_least(const at::Tensor& Z, const at::Tensor& least) {
    return at::where(Z < least, least, Z);
  }

  static constexpr double kTiny = 1e-6;
};

// e^shift changes the result of a norm only through its eps, so eps is scaled instead: e^shift may
// overflow and is never computed. L2 has no eps; its bound only avoids 0 / 0.
struct Normed {
  const Inputs& in;
  const Scaled& y;

  at::Tensor operator()(NoNorm) const { return y.shift.dim() == 1 ? y.o : y.o * y.shift.exp(); }
  at::Tensor operator()(L2 n) const {
    return y.o / lengths(y.o, -1).clamp_min(1e-12) * (n.times_dim ? y.o.size(-1) : 1);
  }
  at::Tensor operator()(Rms n) const { return unit(y.o, n.eps) * in.norm_weight; }
  at::Tensor operator()(Layer n) const {
    return unit(y.o - y.o.mean(-1, true), n.eps) * in.norm_weight + in.norm_bias;
  }
  at::Tensor unit(const at::Tensor& o, double eps) const {
    return o * (o.square().mean(-1, true) + eps * (-2 * y.shift).exp()).rsqrt();
  }
};

at::Tensor log_sum(const Sums& sums) {
  return (sums.W.detach().log() + sums.shift).squeeze(-1);
}

at::Tensor finish(const Spec& spec, const Inputs& in, const Sums& sums) {
  Scaled y = std::visit(Divided{in, sums}, spec.denominator);
  const auto each = [&](const at::Tensor& gate) {
    return spec.channel_gates ? gate : gate.unsqueeze(-1);
  };
  if (spec.output_gate) y.o = y.o * each(in.output_gate);
  at::Tensor o = std::visit(Normed{in, y}, spec.norm);
  if (spec.post_gate) o = o * each(in.post_gate);
  at::Tensor nothing = sums.W == 0;
  if (!nothing.is_cpu() || is_transformed(nothing) || nothing.any().item<bool>()) {
    nothing = nothing.logical_and((sums.N == 0).all(-1, true));
    o = o.masked_fill(nothing, 0);
  }
  return o.to(in.q.scalar_type());
}

}  // namespace horner::attn

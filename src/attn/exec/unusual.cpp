// Rare inputs that kernels do not handle: no keys at all, and NaN among the log gates.
#include <ATen/ATen.h>

#include <cmath>

#include "attn/exec/autograd.h"
#include "attn/exec/exec.h"
#include "attn/inputs.h"
#include "attn/stages.h"

namespace horner::attn::exec {

// N and W are 0, so every row is 0, whatever its stages. It depends on no element of the inputs, so
// their gradients are zeros.
at::Tensor without_keys(const Inputs& in, Statistics* statistics) {
  at::Tensor o =
      at::zeros({in.q.size(0), in.q.size(1), in.q.size(2), in.v.size(3)}, in.q.options());
  for (const Input& i : input_table())
    if (const at::Tensor& x = in.*i.at; x.defined() && has_gradient(i))
      o = o + x.narrow(0, 0, 0).sum().to(o.scalar_type());
  if (!statistics) return o;
  const at::Tensor rows = at::zeros({in.q.size(0), in.q.size(1), in.q.size(2)},
                                    in.q.options().dtype(wide(in.q.scalar_type())));
  statistics->log_sum = at::full_like(rows, -INFINITY);
  for (at::Tensor* x :
       {&statistics->entropy, &statistics->largest, &statistics->first, &statistics->negative})
    *x = rows;
  return o;
}

static const at::Tensor& gates_of(const Inputs& in) {
  return in.decay.defined() ? in.decay : in.channel_decay;
}

bool has_nan_gates(const Inputs& in) {
  return gates_of(in).defined() && gates_of(in).isnan().any().item<bool>();
}

Inputs after_first_keys(const Inputs& in, Carry& carry) {
  const Inputs out = without_idle_gates(in, carry.count);
  if (const at::Tensor &x = gates_of(in), &y = gates_of(out); x.defined())
    carry.decay.masked_fill_(x.isnan().logical_and(y.isnan().logical_not()).any(2), NAN);
  return out;
}

at::Tensor running_gates(at::Tensor logs, const at::Tensor& before, bool of_keys) {
  const at::Tensor nan = of_keys ? logs.isnan() : at::Tensor();
  if (of_keys && nan.is_cpu()) of_keys = nan.any().item<bool>();
  if (of_keys) logs = logs.masked_fill(nan, 0);
  const int64_t held = before.size(2);
  at::Tensor sums = logs.to(at::kDouble).cumsum(-1);
  if (held > 0) sums = sums + before.narrow(2, held - 1, 1);
  if (!of_keys) return sums;
  before.masked_fill_(nan.any(-1, true), NAN);
  const at::Tensor since = nan.flip(-1).cumsum(-1).flip(-1);  // how many from each on
  return sums.masked_fill(since > nan.to(at::kLong), NAN);
}

at::Tensor spoiled_rows(const at::Tensor& nan, const at::Tensor& first, const at::Tensor& last,
                        const Inputs& in) {
  const at::Tensor bad = (nan.dim() == 4 ? nan.any(-1) : nan).to(at::kLong).cumsum(-1);
  const auto until = [&](const at::Tensor& s) {
    const at::Tensor key = s.clamp_max(bad.size(2) - 1).expand({bad.size(0), s.size(1)});
    return at::take_along_dim(bad, key.unsqueeze(1), 2);
  };
  const at::Tensor between = until(last) - until(first);
  const at::Tensor spoiled = (between > 0).logical_and((first < last).unsqueeze(1));
  const at::Tensor one = at::ones({1}, in.q.options().dtype(wide(in.q.scalar_type())));
  return at::where(spoiled.repeat_interleave(in.q.size(1) / in.k.size(1), 1), NAN, one)
      .unsqueeze(-1);
}

static at::Tensor spoiled_rows(const Spec& spec, const Inputs& in, const at::Tensor& nan) {
  const int64_t T = in.q.size(2), S = in.k.size(2);
  const at::TensorOptions places = in.q.options().dtype(at::kLong);
  const at::Tensor at_query = at::arange(S - T, S, places).clamp_min(0).unsqueeze(0);
  at::Tensor first = first_keys(spec.mask, in).clamp(0, S - 1).unsqueeze(0);  // [1 or B, T]
  if (in.keep.defined()) {  // the next key that is not hidden
    const at::Tensor s = at::arange(S, places).expand({in.k.size(0), S});
    const at::Tensor next = at::where(in.keep, s, S).flip(1);
    first = std::get<0>(next.cummin(1)).flip(1).gather(1, first.expand({in.k.size(0), T}));
  }
  return spoiled_rows(nan, first, at_query, in);
}

std::pair<Inputs, at::Tensor> without_nan_gates(const Spec& spec, const Inputs& in) {
  const at::Tensor& gates = gates_of(in);
  if (!gates.defined()) return {in, at::Tensor()};
  const at::Tensor nan = gates.detach().isnan();
  Inputs clean = in;
  (in.decay.defined() ? clean.decay : clean.channel_decay) = gates.masked_fill(nan, 0);
  return {clean, spoiled_rows(spec, in, nan)};
}

// The running sums of the kernels would carry a NaN to every later row of its head, even to rows of
// other packed sequences and to rows whose window is past it. The executions on a GPU handle NaN
// themselves (spoil_rows), because reading the gates here would wait for the device.
at::Tensor run_with_gates(const Execution& e, const Spec& spec, const Inputs& in,
                          Statistics* statistics) {
  const at::Tensor& gates = gates_of(in);
  const bool on_cpu = &e == &fused_cpu || &e == &chunked || &e == &recurrent;
  if (!on_cpu || !gates.defined()) return e.run(spec, in, statistics);
  if (!has_nan_gates(in)) return e.run(spec, in, statistics);
  const auto [clean, factor] = without_nan_gates(spec, in);
  const at::Tensor o = e.run(spec, clean, statistics);
  if (statistics)
    for (at::Tensor* x : {&statistics->entropy, &statistics->largest, &statistics->first,
                          &statistics->negative, &statistics->log_sum})
      if (x->defined()) *x = *x * factor.squeeze(-1);
  return (o * factor).to(o.scalar_type());
}

}  // namespace horner::attn::exec

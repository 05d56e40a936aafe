#include "attn/exec/cpu.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/exec/isa.h"
#include "attn/parallel.h"
#include "attn/stages.h"

namespace horner::attn::exec {

Intervals::Intervals(const Mask& mask, const Inputs& in) {
  if (in.cu_seqlens.defined() || !is_interval(mask)) {
    const KeysSeen keys = keys_seen(mask, in);
    lo = keys.lo.to(at::kInt), hi = keys.hi.to(at::kInt);
    if (keys.from.defined()) from = keys.from.to(at::kInt), to = keys.to.to(at::kInt);
    return;
  }
  // A loop: for a few tokens tensor operations would take longer than attention itself.
  const int64_t T = in.q.size(2), S = in.k.size(2);
  lo = at::empty({T}, at::kInt), hi = at::empty({T}, at::kInt);
  int32_t *l = lo.data_ptr<int32_t>(), *h = hi.data_ptr<int32_t>();
  for (int64_t t = 0; t < T; ++t) {
    const Interval seen = interval(mask, t, S, T);
    l[t] = int32_t(seen.lo), h[t] = int32_t(seen.hi);
  }
}

Intervals Intervals::of_keys(int64_t first, int64_t S) const {
  Intervals some = *this;
  for (at::Tensor* end : {&some.lo, &some.hi, &some.from, &some.to})
    if (end->defined()) *end = (*end - first).clamp(0, S);
  return some;
}

kernels::SeenKeys Intervals::pointers() const {
  return {pointer<int32_t>(lo), pointer<int32_t>(hi), pointer<int32_t>(from), pointer<int32_t>(to),
          hi.dim() == 2 ? hi.size(1) : 0};
}

Intervals Intervals::before_last(int64_t n) const {
  Intervals rest = *this;
  rest.hi = at::maximum(lo, hi - n);
  return rest;
}

// A number that is not finite would stay in the running sums, so such numbers are counted instead.
at::Tensor Intervals::sums(const at::Tensor& x) const {
  const auto differences = [&](const at::Tensor& x) {
    return sums_over_keys({lo, hi, from, to}, x);
  };
  if (!x.is_floating_point() || x.detach().sum(at::kDouble).isfinite().item<bool>())
    return differences(x);
  at::Tensor sums = differences(x.masked_fill(x.isfinite().logical_not(), 0));
  for (const double odd : {double(INFINITY), -double(INFINITY), double(NAN)}) {
    const at::Tensor is = odd == odd ? x == odd : x.isnan();
    sums = sums + at::zeros_like(sums).masked_fill_(differences(is) > 0, odd);
  }
  return sums;
}

void Prepared::map(const Spec& spec, const Inputs& in) {
  repeats = in.q.size(1) / in.k.size(1);
  q = mapped(spec.features, in.q, in.query_projection);
  k = mapped(spec.features, in.k, in.key_projection, repeats);
  decay = log_gates(spec.decay, in);
  if (decay.defined()) decay = decay.to(at::kDouble).cumsum(-1);
}

void Prepared::sharpen(const Spec& spec, const Inputs& in) {
  count = count.to(wide(in.q.scalar_type()));
  factor = scale(spec, in, count);
  if (factor.dim() == 0) one_factor = factor.item<double>();
}

Prepared::Prepared(const Spec& spec, const Inputs& in, const at::Tensor& before, bool counted)
    : seen(spec.mask, in) {
  map(spec, in);
  if (!counted && is<Flat>(spec.sharpness)) {
    one_factor = scale_factor(spec, in);
    return;
  }
  ones = in.keep.defined() ? in.keep.unsqueeze(1).unsqueeze(3)
                           : at::ones({1, 1, in.k.size(2), 1}, at::kBool);
  count = seen.sums(ones);
  if (before.defined()) count = count + before.view({-1, 1, 1, 1});
  sharpen(spec, in);
}

Prepared::Prepared(const Spec& spec, const Inputs& in, const Intervals& all,
                   const at::Tensor& of_rows)
    : seen(all), count(of_rows) {
  map(spec, in);
  sharpen(spec, in);
}

at::Tensor Prepared::kept_keys() const {
  return k.masked_fill(ones.logical_not(), 0);
}

at::Tensor Prepared::gates(const Inputs& in) const {
  const at::Tensor gates = in.denominator_gate.to(at::kDouble).exp().unsqueeze(-1);
  const at::Tensor share = gates.masked_fill(ones.logical_not(), 0);
  return seen.sums(share).to(wide(in.q.scalar_type())).repeat_interleave(repeats, 1);
}

Dropout dropout(const Spec& spec, const Inputs& in) {
  if (spec.dropout == 0) return {};
  return {uint64_t(in.seed.item<int64_t>()), dropped_below(spec.dropout),
          float(1 / (1 - spec.dropout))};
}

at::Tensor bias_gradient(const at::Tensor& bias) {
  return bias.defined() && bias.requires_grad() ? at::zeros_like(bias) : at::Tensor();
}

at::Tensor transposed(const at::Tensor& x) {
  const int64_t S = x.size(2), C = x.size(3) / (is_paired(x) ? 2 : 1), n = kernels::blocks(S);
  const at::Tensor tiles = at::empty({x.size(0), x.size(1), n, C, kernels::kTile}, at::kFloat);
  const auto* from = static_cast<const float*>(x.const_data_ptr());
  float* to = tiles.data_ptr<float>();
  const kernels::FusedKernels& k = *isa().fused;
  for_each_task(x.size(0) * x.size(1) * n, [&](int64_t i) {
    k.transpose({from + i / n * S * C, to + i / n * n * C * kernels::kTile, S, C}, i % n);
  });
  return tiles;
}

at::Tensor padded(const at::Tensor& x, at::ScalarType dtype) {
  if (!x.defined()) return x;
  const int64_t rest = -x.size(-1) & (kernels::kPad - 1);
  if (rest == 0 && x.scalar_type() == dtype && x.is_contiguous()) return x;
  return (rest ? at::constant_pad_nd(x, {0, rest}) : x).to(dtype).contiguous();
}

c10::SymInt padded(const c10::SymInt& channels) {
  return (channels + (kernels::kPad - 1)) / kernels::kPad * kernels::kPad;
}

}  // namespace horner::attn::exec

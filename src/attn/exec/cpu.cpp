#include "attn/exec/cpu.h"

#include <ATen/ATen.h>

#include "attn/kernels/cpu/fused/fused.h"
#include "attn/stages.h"

namespace horner::attn::exec {

Intervals::Intervals(const Mask& mask, const Inputs& in) {
  const int64_t T = in.q.size(2), S = in.k.size(2);
  lo = at::empty({T}, at::kInt), hi = at::empty({T}, at::kInt);
  int32_t *l = lo.data_ptr<int32_t>(), *h = hi.data_ptr<int32_t>();
  const Reach r = reach(mask);
  for (int64_t t = 0; t < T; ++t) {
    const auto [from, to] = interval(r, t + S - T, S);
    l[t] = int32_t(from), h[t] = int32_t(to);
  }
  if (!in.cu_seqlens.defined()) return;
  const at::Tensor cuts = in.cu_seqlens.to(at::kLong).contiguous();
  const int64_t* c = cuts.data_ptr<int64_t>();
  for (int64_t i = 0; i + 1 < cuts.numel(); ++i)
    for (int64_t t = c[i]; t < c[i + 1]; ++t) {
      l[t] = std::max<int32_t>(l[t], int32_t(c[i]));
      h[t] = std::min<int32_t>(h[t], int32_t(c[i + 1]));
    }
}

// Differences of running sums, in double.
at::Tensor Intervals::sums(const at::Tensor& x) const {
  const at::Tensor running = at::constant_pad_nd(x.to(at::kDouble).cumsum(-2), {0, 0, 1, 0});
  return running.index_select(-2, hi) - running.index_select(-2, at::minimum(lo, hi));
}

Prepared::Prepared(const Spec& spec, const Inputs& in, const at::Tensor& before, bool counted)
    : seen(spec.mask, in), repeats(in.q.size(1) / in.k.size(1)) {
  const at::ScalarType dtype = wide(in.q.scalar_type());
  q = mapped(spec.features, in.q, in.query_projection);
  k = mapped(spec.features, in.k, in.key_projection, repeats);
  decay = log_gates(spec.decay, in);
  if (decay.defined()) decay = decay.to(at::kDouble).cumsum(-1);
  if (!counted && is<Flat>(spec.sharpness)) {
    factor = at::scalar_tensor(scale_factor(spec, in), dtype);
    return;
  }
  ones = in.keep.defined() ? in.keep.view({in.q.size(0), 1, -1, 1})
                           : at::ones({1, 1, in.k.size(2), 1}, at::kBool);
  count = seen.sums(ones);
  if (before.defined()) count = count + before.view({-1, 1, 1, 1});
  count = count.to(dtype);
  factor = scale(spec, in, count);
}

at::Tensor Prepared::gates(const Inputs& in) const {
  const at::Tensor share = in.denominator_gate.to(at::kDouble).exp().unsqueeze(-1) * ones;
  return seen.sums(share).to(wide(in.q.scalar_type())).repeat_interleave(repeats, 1);
}

at::Tensor statistics_memory(const Inputs& in, Statistics* to) {
  if (!to) return {};
  const at::Tensor all = at::empty({4, in.q.size(0), in.q.size(1), in.q.size(2)}, at::kFloat);
  *to = {all.select(0, 0), all.select(0, 1), all.select(0, 2), all.select(0, 3)};
  return all;
}

at::Tensor padded(const at::Tensor& x, at::ScalarType dtype) {
  if (!x.defined()) return x;
  const int64_t rest = -x.size(-1) & (kernels::kPad - 1);
  return (rest ? at::constant_pad_nd(x, {0, rest}) : x).to(dtype).contiguous();
}

}  // namespace horner::attn::exec

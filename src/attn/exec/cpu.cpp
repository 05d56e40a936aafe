#include "attn/exec/cpu.h"

#include <ATen/ATen.h>

namespace horner::attn::exec {

Intervals::Intervals(const Mask& mask, const Inputs& in) {
  const int64_t T = in.q.size(2), S = in.k.size(2);
  lo = at::empty({T}, at::kInt), hi = at::empty({T}, at::kInt);
  int32_t *l = lo.data_ptr<int32_t>(), *h = hi.data_ptr<int32_t>();
  for (int64_t t = 0; t < T; ++t) {
    const int64_t position = t + S - T;
    const auto* window = std::get_if<Window>(&mask);
    l[t] = window ? int32_t(std::max<int64_t>(0, position + 1 - window->size)) : 0;
    h[t] = int32_t(is<Full>(mask) ? S : std::max<int64_t>(0, position + 1));
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

// From running sums, in double.
at::Tensor Intervals::sums(const at::Tensor& x) const {
  const at::Tensor running = at::constant_pad_nd(x.to(at::kDouble).cumsum(-2), {0, 0, 1, 0});
  return running.index_select(-2, hi) - running.index_select(-2, at::minimum(lo, hi));
}

}  // namespace horner::attn::exec

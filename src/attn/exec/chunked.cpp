// Blocks of tokens: quadratic inside a block, a state between blocks.
#include <ATen/ATen.h>

#include "attn/exec/exec.h"
#include "attn/exec/features.h"

namespace horner::attn::exec {

static at::Tensor run(const Spec& spec, const Inputs& in) {
  constexpr int64_t kBlock = 64;
  const Expanded e = expand(spec, in);
  const int64_t T = e.q.size(2);
  at::Tensor S = at::zeros({e.q.size(0), e.q.size(1), e.q.size(3), e.v.size(3)}, e.q.options());
  std::vector<at::Tensor> sums;
  for (int64_t t = 0; t < T; t += kBlock) {
    const int64_t n = std::min(kBlock, T - t);
    const at::Tensor q = e.q.narrow(2, t, n), k = e.k.narrow(2, t, n), v = e.v.narrow(2, t, n);
    const at::Tensor g = e.decay.narrow(2, t, n).cumsum(-1).unsqueeze(-1);  // [B, H, n, 1]
    const at::Tensor last = g.narrow(2, n - 1, 1);
    const at::Tensor fade = (g - g.transpose(-1, -2)).tril().exp().tril();
    const at::Tensor inside = at::matmul(at::matmul(q, k.transpose(-1, -2)) * fade, v);
    sums.push_back(inside + at::matmul(q * g.exp(), S));
    S = S * last.exp() + at::matmul((k * (last - g).exp()).transpose(-1, -2), v);
  }
  return finish_sums(spec, in, e, at::cat(sums, 2));
}

const Execution chunked{
    .name = "chunked",
    .about = "blocks of tokens, a state between blocks",
    .why_not = why_no_state,
    .run = run,
};

}  // namespace horner::attn::exec

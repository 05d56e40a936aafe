// One token at a time:  S_t = g_t S_{t-1} + phi(k_t) [v_t 1]^T,   [N_t W_t] = phi(q_t) S_t.
#include <ATen/ATen.h>

#include "attn/exec/exec.h"
#include "attn/exec/features.h"

namespace horner::attn::exec {

static at::Tensor run(const Spec& spec, const Inputs& in) {
  const Expanded e = expand(spec, in);
  at::Tensor S = at::zeros({e.q.size(0), e.q.size(1), e.q.size(3), e.v.size(3)}, e.q.options());
  std::vector<at::Tensor> sums;
  for (int64_t t = 0; t < e.q.size(2); ++t) {
    const at::Tensor gate = e.decay.select(2, t).exp().unsqueeze(-1).unsqueeze(-1);
    S = S * gate + e.k.select(2, t).unsqueeze(-1) * e.v.select(2, t).unsqueeze(-2);
    sums.push_back(at::matmul(e.q.select(2, t).unsqueeze(-2), S));
  }
  return finish_sums(spec, in, e, at::cat(sums, 2));
}

const Execution recurrent{
    .name = "recurrent",
    .about = "one token at a time through a state",
    .why_not = why_no_state,
    .run = run,
};

}  // namespace horner::attn::exec

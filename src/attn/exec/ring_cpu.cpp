// fused_cpu for a sequence over several ranks: its kernels on one block of keys after another.
#include <ATen/ATen.h>

#include "attn/exec/exec.h"
#include "attn/exec/fused_cpu.h"
#include "attn/exec/ring.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace {

struct RingJob {
  TileJob tiles;  // with the keys of all ranks in `seen`
  Spec spec;
  Inputs in;         // for what follows the sums
  at::Tensor count;  // [1, 1, T, 1]
  Ring ring;

  TileJob block(int owner, const at::Tensor& query_decay, const at::Tensor& to = {}) const {
    TileJob job = tiles;
    job.seen = ring.of_block(owner);
    job.query_decay = query_decay, job.d_query_decay = to;
    return job;
  }
};

TileResult forward(const RingJob& job, const FusedTensors& x, bool) {
  const auto of_block = [&](int owner, const FusedTensors& block) {
    const TileResult r = tiles_forward(job.block(owner, x.decay), block, true);
    return BlockSums{r.N, r.W, r.shift};
  };
  const BlockSums all = sums_round(job.ring, x, is<Exp>(job.spec.weight), of_block);
  const int64_t E = job.in.v.size(3);
  const at::Tensor W = all.W.unsqueeze(-1), shift = all.shift.unsqueeze(-1);
  const at::Tensor o = finish(job.spec, job.in, {all.N.narrow(-1, 0, E), W, shift, job.count, {}});
  return {at::constant_pad_nd(o.to(at::kFloat), {0, all.N.size(3) - E}), all.N, all.W, all.shift};
}

FusedTensors backward(const RingJob& job, const FusedTensors& x, const TileResult& r,
                      const TileResult& grads) {
  const at::Tensor to = x.decay.defined() ? at::zeros_like(x.decay) : at::Tensor();
  const auto of_block = [&](int owner, const FusedTensors& block) {
    return tiles_backward(job.block(owner, x.decay, to), block, r, grads);
  };
  FusedTensors d = gradients_round(job.ring, x, of_block);
  if (to.defined()) d.decay += to;
  return d;
}

}  // namespace

at::Tensor attend_round(const Spec& given, const Inputs& own, const Ring& ring) {
  const WithoutChannelGates rest(given, own);
  const Inputs& in = rest.in;
  Prepared p(rest.spec, in, ring.seen, ring.count());
  if (p.decay.defined()) p.decay = (p.decay + ring.decay_before.unsqueeze(-1)).contiguous();
  const auto [tiles, x] = tiles_of(rest.spec, in, p);
  RingJob job{tiles, rest.spec, in, p.count, ring};
  for (at::Tensor* y : {&job.in.q, &job.in.k, &job.in.v, &job.in.output_gate, &job.in.post_gate,
                        &job.in.norm_weight, &job.in.norm_bias, &job.in.sink})
    if (y->defined()) *y = y->detach();
  at::Tensor o = differentiable("fused_cpu", job, x, forward, backward).o;
  if (o.size(-1) > in.v.size(-1)) o = o.narrow(-1, 0, in.v.size(-1));
  return rest.finish(o).to(in.q.scalar_type());
}

}  // namespace horner::attn::exec

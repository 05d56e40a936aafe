// The sums of a row over blocks of keys, one of each rank, are merged:
//   m = max(m_1, m_2),  N = e^(m_1 - m) N_1 + e^(m_2 - m) N_2,  W likewise
// and the denominator, gates and norm follow. With the merged N, W and m, backward needs one block
// at a time as well: each adds to dq, and its own dk and dv travel with it.
#include "attn/exec/ring_cpu.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/exec/exec.h"
#include "attn/exec/fused_cpu.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace {

struct RingJob {
  TileJob tiles;  // with the keys of all ranks in `seen`
  Spec spec;
  Inputs in;         // for what follows the sums
  at::Tensor count;  // [1, 1, T, 1]
  Ring ring;

  // The rank whose keys are here after so many steps.
  int owner(int step) const { return (ring.rank - step + ring.ranks) % ring.ranks; }
  TileJob block(int owner, const at::Tensor& query_decay, const at::Tensor& to = {}) const {
    const int64_t T = in.k.size(2);
    TileJob job = tiles;
    job.seen = tiles.seen.of_keys(owner * T, T);
    job.query_decay = query_decay, job.d_query_decay = to;
    return job;
  }
};

bool sees_any(const Intervals& i) {
  const auto some = [](const at::Tensor& lo, const at::Tensor& hi) {
    return hi.defined() && (hi > lo).any().item<bool>();
  };
  return some(i.lo, i.hi) || some(i.from, i.to);
}

// What travels: the tensors of keys, or their gradients.
constexpr at::Tensor FusedTensors::* kOfKeys[] = {&FusedTensors::k, &FusedTensors::v,
                                                  &FusedTensors::gate, &FusedTensors::decay};

void pass_on(const Ring& ring, FusedTensors& block) {
  for (at::Tensor FusedTensors::* x : kOfKeys)
    if ((block.*x).defined()) block.*x = ring.pass(block.*x);
}

// Adds the sums of other keys. A row that sees none of them has W = 0, and its shift says nothing.
void merge(TileResult& all, const TileResult& more, bool shifted) {
  if (!shifted) {
    all.N += more.N, all.W += more.W;
    return;
  }
  const auto of = [](const TileResult& r) { return r.shift.masked_fill(r.W == 0, -INFINITY); };
  const at::Tensor one = of(all), two = of(more), most = at::maximum(one, two);
  all.shift = most.masked_fill(most == -INFINITY, 0);
  const at::Tensor left = (one - all.shift).exp(), right = (two - all.shift).exp();
  all.N.mul_(left.unsqueeze(-1)).addcmul_(more.N, right.unsqueeze(-1));
  all.W.mul_(left).addcmul_(more.W, right);
}

TileResult forward(const RingJob& job, const FusedTensors& x, bool) {
  const bool shifted = is<Exp>(job.spec.weight);
  TileResult all;
  FusedTensors block = x;
  for (int step = 0; step < job.ring.ranks; ++step) {
    if (step > 0) pass_on(job.ring, block);
    const TileJob tiles = job.block(job.owner(step), x.decay);
    if (step == 0)
      all = tiles_forward(tiles, x, true);
    else if (sees_any(tiles.seen))
      merge(all, tiles_forward(tiles, block, true), shifted);
  }
  const int64_t E = job.in.v.size(3);
  const at::Tensor W = all.W.unsqueeze(-1), shift = all.shift.unsqueeze(-1);
  const at::Tensor o = finish(job.spec, job.in, {all.N.narrow(-1, 0, E), W, shift, job.count, {}});
  all.o = at::constant_pad_nd(o.to(at::kFloat), {0, all.N.size(3) - E});
  return all;
}

FusedTensors backward(const RingJob& job, const FusedTensors& x, const TileResult& r,
                      const TileResult& grads) {
  const int n = job.ring.ranks;
  const at::Tensor to = x.decay.defined() ? at::zeros_like(x.decay) : at::Tensor();
  // Of the rows, and of this rank's own keys; what the others' queries add comes last.
  FusedTensors d = tiles_backward(job.block(job.ring.rank, x.decay, to), x, r, grads);
  FusedTensors block = x, theirs;
  for (at::Tensor FusedTensors::* y : kOfKeys)
    if ((d.*y).defined()) theirs.*y = at::zeros_like(d.*y);
  for (int step = 1; step < n; ++step) {
    pass_on(job.ring, block);
    if (step > 1) pass_on(job.ring, theirs);
    const TileJob tiles = job.block(job.owner(step), x.decay, to);
    if (!sees_any(tiles.seen)) continue;
    const FusedTensors each = tiles_backward(tiles, block, r, grads);
    d.q += each.q;
    if (d.centre.defined()) d.centre += each.centre;
    for (at::Tensor FusedTensors::* y : kOfKeys)
      if ((theirs.*y).defined()) theirs.*y += each.*y;
  }
  pass_on(job.ring, theirs);
  for (at::Tensor FusedTensors::* y : kOfKeys)
    if ((theirs.*y).defined()) d.*y += theirs.*y;
  if (to.defined()) d.decay += to;
  return d;
}

at::Tensor counted(const Intervals& i) {
  at::Tensor n = i.hi - i.lo;
  if (i.from.defined()) n = n + i.to - i.from;
  return n.view({1, 1, -1, 1});
}

}  // namespace

at::Tensor attend_round(const Spec& given, const Inputs& own, const Ring& ring) {
  const WithoutChannelGates rest(given, own);
  const Inputs& in = rest.in;
  Prepared p(rest.spec, in, ring.seen, counted(ring.seen));
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

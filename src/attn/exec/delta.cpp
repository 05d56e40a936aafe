// The delta rule in linear time. Its values follow from each other:
//   u_t = share_t rest_t,  rest_t = v_t - sum_{s < t} w_ts u_s
// and so do the gradients, in reversed time: with p_s = share_s r_s,
//   r_s = du_s - sum_{t > s} w_ts p_t,  dv_s = p_s,  d share_s = r_s.rest_s
// and those of keys and decay are the ones of the sums, whose gradient is -p.
#include <ATen/ATen.h>

#include "attn/exec/sums.h"

namespace horner::attn::exec {

template <class R>
DeltaResult delta_values(const ChunkJob& given, const DeltaTensors& x, bool) {
  ChunkJob job = given;
  job.strict = true;
  const DeltaResult r{at::empty_like(x.v), x.v.clone()};
  (x.channels.defined() ? solve_channels<R> : solve_chunks<R>)(job, x, r);
  return r;
}

static at::Tensor reversed(const at::Tensor& x, int64_t axis = 2) {
  return x.defined() ? x.flip(axis).contiguous() : x;
}

// The tokens from the last to the first. The decay from s to t is that of the gates in (s, t], in
// reversed time too: each gate moves to the token before its own.
static DeltaTensors reversed(const DeltaTensors& x, const at::Tensor& values) {
  DeltaTensors y{reversed(x.k), reversed(values), reversed(x.share)};
  const int64_t T = x.k.size(2);
  if (x.decay.defined()) y.decay = x.decay.narrow(2, T - 1, 1) - reversed(x.decay);
  if (x.channels.defined())
    y.channels =
        at::constant_pad_nd(reversed(x.channels.narrow(2, 1, T - 1)), {0, 0, 1, 0}).contiguous();
  return y;
}
static ChunkJob reversed(ChunkJob job) {
  job.keep = reversed(job.keep, 1);
  if (job.begins.defined())  // where a sequence ends, the one before it begins
    job.begins = at::cat({job.begins.narrow(0, 0, 1), job.begins.slice(0, 1).flip(0)});
  return job;
}

template <class R>
DeltaTensors delta_values_backward(const ChunkJob& given, const DeltaTensors& x,
                                   const DeltaResult& r, const DeltaResult& grads) {
  ChunkJob job = given;
  job.strict = true, job.wanted = job.in_place = false;
  const DeltaResult back = delta_values<R>(reversed(job), reversed(x, grads.u), true);
  const at::Tensor p = reversed(back.u), share = x.share.unsqueeze(-1);
  ChunkTensors keys{x.k, x.k, (share * r.rest).masked_fill(share == 0, 0), x.decay, x.channels};
  if (x.S.defined()) keys.S = x.S, keys.z = at::zeros_like(x.S.select(-1, 0));
  const ChunkResult states =
      (x.channels.defined() ? channel_sums<R> : chunk_sums<R>)(job, keys, true);
  const ChunkResult to{-p, at::zeros_like(states.W), at::zeros_like(states.S),
                       at::zeros_like(states.z)};
  const ChunkTensors d = (x.channels.defined() ? channel_sums_backward<R>
                                               : chunk_sums_backward<R>)(job, keys, states, to);
  return {d.q + d.k, p, (reversed(back.rest) * r.rest).sum(-1), d.decay, d.channels, d.S};
}

template DeltaResult delta_values<float>(const ChunkJob&, const DeltaTensors&, bool);
template DeltaResult delta_values<double>(const ChunkJob&, const DeltaTensors&, bool);
template DeltaTensors delta_values_backward<float>(const ChunkJob&, const DeltaTensors&,
                                                   const DeltaResult&, const DeltaResult&);
template DeltaTensors delta_values_backward<double>(const ChunkJob&, const DeltaTensors&,
                                                    const DeltaResult&, const DeltaResult&);

}  // namespace horner::attn::exec

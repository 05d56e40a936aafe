// The sums of linear attention with a decay of each channel, around kernels/cpu/channels.
#include <ATen/ATen.h>

#include "attn/exec/cpu.h"
#include "attn/exec/isa.h"
#include "attn/exec/sums.h"
#include "attn/parallel.h"

namespace horner::attn::exec {

using kernels::Channels;

template <class R>
static const kernels::ChannelKernels<R>& kernels_for() {
  return *std::get<const kernels::ChannelKernels<R>*>(isa().states);
}

template <class R>
static Channels<R> problem(const ChunkJob& job, const ChunkTensors& x, const at::Tensor& gates) {
  Channels<R> c{};
  c.B = x.q.size(0), c.H = x.q.size(1), c.G = x.k.size(1), c.T = x.q.size(2);
  c.D = job.D, c.width = x.q.size(3), c.E = x.v.size(3);
  c.scale = R(job.scale);
  c.q = pointer<R>(x.q), c.k = pointer<R>(x.k), c.v = pointer<R>(x.v);
  c.gates = pointer<double>(gates);
  c.keep = reinterpret_cast<const uint8_t*>(pointer<bool>(job.keep));
  c.begins = reinterpret_cast<const uint8_t*>(pointer<bool>(job.begins));
  c.strict = job.strict;
  return c;
}

// S and z before the tokens, as memory that the kernels change.
template <class R>
static std::pair<at::Tensor, at::Tensor> first_state(const Channels<R>& c, const at::Tensor& S,
                                                     const at::Tensor& z,
                                                     const at::TensorOptions& options) {
  return {S.defined() ? S.clone() : at::zeros({c.B, c.G, c.D, c.E}, options),
          z.defined() ? z.clone() : at::zeros({c.B, c.G, c.D}, options)};
}

template <class R>
static void for_each_head(const Channels<R>& c,
                          void (*task)(const Channels<R>&, int64_t, R* scratch)) {
  for_each_task<R>(c.B * c.G, kernels_for<R>().scratch(c),
                   [&](int64_t i, R* own) { task(c, i, own); });
}

template <class R>
ChunkResult channel_sums(const ChunkJob& job, const ChunkTensors& x, bool for_backward) {
  const at::Tensor gates = x.channels.exp();
  Channels<R> c = problem<R>(job, x, gates);
  const auto options = x.q.options();
  ChunkResult r;
  r.N = at::empty({c.B, c.H, c.T, c.E}, options), r.W = at::empty({c.B, c.H, c.T}, options);
  std::tie(r.S, r.z) = first_state(c, x.S, x.z, options);
  c.N = pointer<R>(r.N), c.W = pointer<R>(r.W), c.S = pointer<R>(r.S), c.z = pointer<R>(r.z);
  for_each_head(c, kernels_for<R>().forward);
  if (for_backward && job.wanted) r.all_S = r.S.clone(), r.all_z = r.z.clone();
  return r;
}

// The sum of the log gates of a channel up to a token multiplies what its query takes, and divides
// what its key gives: q dq - k dk. A gate is part of the sums of its own token and the later ones.
template <class R>
ChunkTensors channel_sums_backward(const ChunkJob& job, const ChunkTensors& x, const ChunkResult& r,
                                   const ChunkResult& grads) {
  const at::Tensor gates = x.channels.exp();
  Channels<R> c = problem<R>(job, x, gates);
  const auto [S, z] = first_state(c, x.S, x.z, x.q.options());
  const at::Tensor dN = grads.N.contiguous(), dW = grads.W.contiguous();
  const at::Tensor dS = grads.S.clone(at::MemoryFormat::Contiguous);
  const at::Tensor dz = grads.z.clone(at::MemoryFormat::Contiguous);
  ChunkTensors d{at::empty_like(x.q), at::empty_like(x.k), at::empty_like(x.v)};
  at::Tensor flow;  // of the state after the tokens
  if (r.all_S.defined()) flow = (r.all_S * dS).sum(-1) + r.all_z * dz;
  c.S = pointer<R>(S), c.z = pointer<R>(z), c.dS = pointer<R>(dS), c.dz = pointer<R>(dz);
  c.dN = pointer<R>(dN), c.dW = pointer<R>(dW);
  c.dq = pointer<R>(d.q), c.dk = pointer<R>(d.k), c.dv = pointer<R>(d.v);
  for_each_head(c, kernels_for<R>().backward);
  const at::Tensor taken =
      (x.q * d.q).view({c.B, c.G, c.H / c.G, c.T, c.width}).sum(2, false, at::kDouble);
  at::Tensor sums = taken - (x.k * d.k).to(at::kDouble);
  if (job.keep.defined()) sums = sums.masked_fill(sums.isnan(), 0);
  if (flow.defined()) sums.select(2, c.T - 1).narrow(-1, 0, c.D).add_(flow);
  d.channels = sums.flip(2).cumsum(2).flip(2);
  if (x.S.defined()) d.S = dS, d.z = dz;
  return d;
}

template <class R>
void solve_channels(const ChunkJob& job, const DeltaTensors& x, const DeltaResult& r) {
  const at::Tensor gates = x.channels.exp();
  const ChunkTensors keys{x.k, x.k, r.u};
  Channels<R> c = problem<R>(job, keys, gates);
  c.strict = true;
  const auto [S, z] = first_state(c, x.S, {}, x.k.options());
  c.S = pointer<R>(S), c.z = pointer<R>(z), c.share = pointer<R>(x.share);
  c.rest = pointer<R>(r.rest), c.corrected = pointer<R>(r.u);
  for_each_head(c, kernels_for<R>().solve);
}

template ChunkResult channel_sums<float>(const ChunkJob&, const ChunkTensors&, bool);
template ChunkResult channel_sums<double>(const ChunkJob&, const ChunkTensors&, bool);
template ChunkTensors channel_sums_backward<float>(const ChunkJob&, const ChunkTensors&,
                                                   const ChunkResult&, const ChunkResult&);
template ChunkTensors channel_sums_backward<double>(const ChunkJob&, const ChunkTensors&,
                                                    const ChunkResult&, const ChunkResult&);
template void solve_channels<float>(const ChunkJob&, const DeltaTensors&, const DeltaResult&);
template void solve_channels<double>(const ChunkJob&, const DeltaTensors&, const DeltaResult&);

}  // namespace horner::attn::exec

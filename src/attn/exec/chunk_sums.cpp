// The sums of polynomial weights in chunks of tokens, around kernels/cpu/chunked.
#include <ATen/ATen.h>

#include "attn/exec/cpu.h"
#include "attn/exec/isa.h"
#include "attn/exec/large.h"
#include "attn/exec/sums.h"
#include "attn/parallel.h"

namespace horner::attn::exec {

using kernels::Chunked;

template <class R>
static const kernels::ChunkedKernels<R>& kernels_for() {
  return *std::get<const kernels::ChunkedKernels<R>*>(isa().states);
}

template <class R>
static Chunked<R> problem(const ChunkJob& job, const ChunkTensors& x) {
  Chunked<R> c{};
  c.B = x.q.size(0), c.H = x.q.size(1), c.G = x.k.size(1), c.T = x.q.size(2);
  c.D = job.D, c.width = x.q.size(3), c.E = x.v.size(3);
  c.first = job.orders.first, c.last = job.orders.last;
  c.weight = polynomial<R>(c.first, c.last), c.scale = R(job.scale);
  for (int p = c.first; p <= c.last; ++p) c.F += kernels::monomials(c.D, p);
  c.C = job.cut.C, c.segments = job.cut.segments, c.length = job.cut.length;
  c.q = pointer<R>(x.q), c.k = pointer<R>(x.k), c.v = pointer<R>(x.v);
  c.decay = pointer<double>(x.decay), c.centre = pointer<R>(x.centre);
  c.keep = reinterpret_cast<const uint8_t*>(pointer<bool>(job.keep));
  c.begins = reinterpret_cast<const uint8_t*>(pointer<bool>(job.begins));
  c.filled = x.S.defined();
  c.wanted = job.wanted, c.strict = job.strict;
  return c;
}

template <class R, class F>
static void for_each_segment(const Chunked<R>& c, const F& task) {
  for_each_task<R>(c.B * c.G * c.segments, kernels_for<R>().scratch(c),
                   [&](int64_t i, R* own) { task(c, i, own); });
}

template <class R>
ChunkResult chunk_sums(const ChunkJob& job, const ChunkTensors& x, bool for_backward) {
  Chunked<R> c = problem<R>(job, x);
  const auto options = x.q.options();
  const bool stateless = c.T <= c.C && !c.filled && !c.wanted && !job.begins.defined();
  if (stateless) c.F = 0;  // one chunk, and no state to keep
  ChunkResult r;
  r.N = large_empty({c.B, c.H, c.T, c.E}, options), r.W = at::empty({c.B, c.H, c.T}, options);
  c.slots = c.segments + 1;
  if (job.in_place && !for_backward && c.filled && c.segments == 1) {
    c.slots = 1;
    r.all_S = x.S.unsqueeze(2), r.all_z = x.z.unsqueeze(2);
  } else {
    r.all_S = at::empty({c.B, c.G, c.slots, c.F, c.E}, options);
    r.all_z = at::empty({c.B, c.G, c.slots, c.F}, options);
    c.filled ? r.all_S.select(2, 0).copy_(x.S) : r.all_S.select(2, 0).zero_();
    c.filled ? r.all_z.select(2, 0).copy_(x.z) : r.all_z.select(2, 0).zero_();
  }
  c.N = pointer<R>(r.N), c.W = pointer<R>(r.W);
  c.S = pointer<R>(r.all_S), c.z = pointer<R>(r.all_z);
  const kernels::ChunkedKernels<R>& kernel = kernels_for<R>();
  if (c.segments > 1) {
    for_each_segment(c, kernel.sums);
    for_each_task(c.B * c.G, [&](int64_t i) { kernel.scan(c, i); });
  }
  for_each_segment(c, kernel.forward);
  r.S = r.all_S.select(2, -1), r.z = r.all_z.select(2, -1);
  if (for_backward) r.S = r.S.clone(), r.z = r.z.clone();
  return r;
}

template <class R>
ChunkTensors chunk_sums_backward(const ChunkJob& job, const ChunkTensors& x, const ChunkResult& r,
                                 const ChunkResult& grads) {
  Chunked<R> c = problem<R>(job, x);
  const at::Tensor &S = r.all_S, &z = r.all_z;
  c.F = S.size(3), c.slots = S.size(2);
  const at::Tensor dN = grads.N.contiguous(), dW = grads.W.contiguous();
  const at::Tensor dS = at::empty_like(S), dz = at::empty_like(z);
  dS.select(2, c.segments).copy_(grads.S), dz.select(2, c.segments).copy_(grads.z);
  ChunkTensors d;
  for (auto [to, from] : {std::pair{&d.q, &x.q}, {&d.k, &x.k}, {&d.v, &x.v}})
    *to = large_empty(from->sizes(), from->options());
  if (x.decay.defined()) d.decay = at::zeros_like(x.decay);
  if (x.centre.defined()) d.centre = at::empty_like(x.centre);
  c.S = pointer<R>(S), c.z = pointer<R>(z), c.dS = pointer<R>(dS), c.dz = pointer<R>(dz);
  c.dN = pointer<R>(dN), c.dW = pointer<R>(dW);
  c.dq = pointer<R>(d.q), c.dk = pointer<R>(d.k), c.dv = pointer<R>(d.v);
  c.d_centre = pointer<R>(d.centre), c.d_decay = pointer<double>(d.decay);
  if (x.decay.defined() && c.wanted) {  // the last state decays with the last running sum
    const at::Tensor flow = (S.select(2, c.segments) * dS.select(2, c.segments)).sum({-1, -2}) +
                            (z.select(2, c.segments) * dz.select(2, c.segments)).sum(-1);
    d.decay.select(2, c.T - 1).add_(flow);
  }
  const kernels::ChunkedKernels<R>& kernel = kernels_for<R>();
  if (c.segments > 1) {
    for_each_segment(c, kernel.backward_sums);
    for_each_task(c.B * c.G, [&](int64_t i) { kernel.backward_scan(c, i); });
  }
  for_each_segment(c, kernel.backward);
  if (c.filled) d.S = dS.select(2, 1).clone(), d.z = dz.select(2, 1).clone();
  return d;
}

// In one segment, from a copy of the state.
template <class R>
void solve_chunks(const ChunkJob& job, const DeltaTensors& x, const DeltaResult& r) {
  ChunkTensors keys{x.k, x.k, r.u, x.decay};
  keys.S = x.S;
  Chunked<R> c = problem<R>(job, keys);
  c.segments = 1, c.length = (c.T + c.C - 1) / c.C * c.C, c.slots = 1;
  if (c.T <= c.C && !c.filled && !job.begins.defined()) c.F = 0;
  const auto options = x.k.options();
  const at::Tensor S = c.filled ? x.S.clone() : at::zeros({c.B, c.G, c.F, c.E}, options);
  const at::Tensor z = at::zeros({c.B, c.G, c.F}, options);
  c.S = pointer<R>(S), c.z = pointer<R>(z), c.share = pointer<R>(x.share);
  c.rest = pointer<R>(r.rest), c.corrected = pointer<R>(r.u);
  for_each_segment(c, kernels_for<R>().solve);
}

template ChunkResult chunk_sums<float>(const ChunkJob&, const ChunkTensors&, bool);
template ChunkResult chunk_sums<double>(const ChunkJob&, const ChunkTensors&, bool);
template ChunkTensors chunk_sums_backward<float>(const ChunkJob&, const ChunkTensors&,
                                                 const ChunkResult&, const ChunkResult&);
template ChunkTensors chunk_sums_backward<double>(const ChunkJob&, const ChunkTensors&,
                                                  const ChunkResult&, const ChunkResult&);
template void solve_chunks<float>(const ChunkJob&, const DeltaTensors&, const DeltaResult&);
template void solve_chunks<double>(const ChunkJob&, const DeltaTensors&, const DeltaResult&);

}  // namespace horner::attn::exec

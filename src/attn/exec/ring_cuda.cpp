// fused_cuda for a sequence over several ranks: its kernels on one block of keys after another. The
// rest, from the denominator on, is tensor code.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include <cmath>

#include "attn/exec/counted_cuda.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/exec/exec.h"
#include "attn/exec/features_cuda.h"
#include "attn/exec/gradients_cuda.h"
#include "attn/exec/ring.h"
#include "attn/kernels/cuda/fused/fused.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;
using cuda::Fused;

namespace {

struct RoundJob {
  Ring ring;
  cuda::Weights weights;
  float scale, clamp, softcap;
  int channels;

  bool is_exp() const { return std::holds_alternative<Exp>(weights); }
};

struct RoundResult {
  at::Tensor N, W, shift;  // [B, H, T, E], [B, H, T]; float32

  static auto outputs(auto& r) { return std::array{&r.N, &r.W, &r.shift}; }
  static auto saved(auto& r) { return std::array{&r.shift}; }
};

// What this rank's queries see of the keys of another, of S; those from T on nobody sees.
SeenKeys keys_of(const Ring& ring, int owner, int64_t S, at::Device device) {
  const Intervals i = ring.of_block(owner);
  const int64_t T = ring.tokens();
  SeenKeys keys;
  keys.seen.T = int(T), keys.seen.S = int(S);
  if (S == T && !i.from.defined() && i.lo.eq(0).all().item<bool>()) {
    keys.seen.causal = i.hi.equal(at::arange(1, T + 1, i.hi.options()));
    if (keys.seen.causal || i.hi.eq(T).all().item<bool>()) return keys;
  }
  const auto there = [&](const at::Tensor& x) { return x.defined() ? x.to(device) : x; };
  list_keys({there(i.lo), there(i.hi), there(i.from), there(i.to)}, S, keys);
  return keys;
}

// A block of keys with this rank's queries, as the kernels take them.
struct Block {
  FusedTensors x;
  SeenKeys keys;
  Fused f;

  Block(const RoundJob& job, const FusedTensors& own, const FusedTensors& of, int owner)
      : x{own.q, of.k, of.v, own.centre, of.decay, of.gate} {
    const int64_t T = x.q.size(2);
    if (x.decay.defined() && owner != job.ring.rank) {
      // The kernels read the running sum of a query at its place, which is behind these keys.
      x.decay = at::cat({of.decay, own.decay}, 2);
      x.k = at::constant_pad_nd(x.k, {0, 0, 0, T}), x.v = at::constant_pad_nd(x.v, {0, 0, 0, T});
      if (x.gate.defined()) x.gate = at::constant_pad_nd(x.gate, {0, T});
    }
    keys = keys_of(job.ring, owner, x.k.size(2), x.k.device());
    cuda::Epilogue epilogue{};
    epilogue.by_sum = job.is_exp(), epilogue.counted = keys.seen;
    f = problem_of(x, epilogue, job.channels);
    f.scale = job.scale, f.clamp = job.clamp, f.softcap = job.softcap;
    f.centre = memory<float>(x.centre), f.gate = memory<float>(x.gate);
    f.decay = memory<double>(x.decay), f.decay_in_scores = f.decay && job.is_exp();
    f.seen = keys.seen, f.lists = keys.lists;
  }
};

RoundResult forward(const RoundJob& job, const FusedTensors& own, bool) {
  const auto of_block = [&](int owner, const FusedTensors& of) {
    Block b(job, own, of, owner);
    const FusedSums sums(b.f, job.weights, own.v.options());
    at::Tensor N = sums.o.to(at::kFloat);
    if (job.is_exp()) N.mul_(sums.W().unsqueeze(-1));
    return BlockSums{N, sums.W(), sums.shift()};
  };
  const BlockSums all = sums_round(job.ring, own, job.is_exp(), of_block);
  return {all.N, all.W, all.shift};
}

// Of N and W, which are relative to the shift of all blocks.
FusedTensors backward(const RoundJob& job, const FusedTensors& own, const RoundResult& r,
                      const RoundResult& grads) {
  const at::Tensor g = laid_out(grads.N.to(own.v.scalar_type()));
  const at::Tensor by = job.is_exp() ? r.shift : at::zeros_like(r.shift);
  const float unit = cuda::unit_of_sub(job.is_exp(), g.scalar_type() == at::kFloat);
  const at::Tensor sub = (own.centre.defined() ? by + own.centre : by) * unit;
  const double per = job.is_exp() ? M_LOG2E : 1;
  at::Tensor d_sums;  // of this rank's running sums
  if (own.decay.defined()) d_sums = at::zeros_like(own.decay);
  const auto of_block = [&](int owner, const FusedTensors& of) {
    Block b(job, own, of, owner);
    Fused& f = b.f;
    const at::Tensor limit = (cuda::last_clamp(f) - by) * per;
    const at::Tensor queries = at::stack({sub, limit, at::ones_like(by), grads.W}, -1);
    const at::Tensor dk = at::empty({f.B, f.G, f.S, f.D}, own.k.options());
    const at::Tensor dv = at::empty({f.B, f.G, f.S, f.E}, own.v.options());
    at::Tensor d_gate;
    if (b.x.gate.defined()) d_gate = at::zeros_like(b.x.gate);
    const DecayGradient d_decay(f, own.decay);
    f.d_o = view(g), f.queries = memory<cuda::Query>(queries);
    f.dk = dk.data_ptr(), f.dv = dv.data_ptr();
    f.d_gate = memory<float>(d_gate);
    const at::Tensor dq = fused_gradients(f, job.weights, own.q);
    const auto sums = [&](const at::Tensor& x) { return x.narrow(2, 0, f.T).to(at::kFloat); };
    FusedTensors d{dq.to(at::kFloat), sums(dk), sums(dv)};
    if (d_gate.defined()) d.gate = d_gate.narrow(2, 0, f.T);
    if (d_decay.key.defined()) {
      d.decay = d_decay.key.narrow(2, 0, f.T);
      add_query_decay(d_sums, d_decay.query);
    }
    return d;
  };
  FusedTensors d = gradients_round(job.ring, own, of_block);
  if (d.decay.defined()) d.decay += d_sums;
  return d;
}

}  // namespace

at::Tensor attend_round_on_gpu(const Spec& given, const Inputs& own, const Ring& ring) {
  if (own.q.scalar_type() == at::kHalf)  // too few bits for the gradient of a sum
    return attend_round_on_gpu(given, in_float32(own), ring).to(at::kHalf);
  const WithoutChannelGates rest(given, own);
  const Spec& spec = rest.spec;
  const Inputs& in = rest.in;
  const c10::cuda::CUDAGuard guard(in.q.device());
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  const at::Tensor count = ring.count().to(in.q.device(), at::kFloat);
  const bool by_row = sharpness_from(spec.sharpness) == SharpnessFrom::count;
  RoundJob job{.ring = ring,
               .weights = cuda_weights(spec.weight),
               .scale = 1,
               .clamp = float(spec.clamp),
               .softcap = float(spec.softcap),
               .channels = int(in.v.size(-1))};
  const at::Tensor of_row = by_row ? scale(spec, in, count) : at::Tensor();
  at::Tensor q = mapped_on_gpu(spec.features, in.q, in.query_projection, 1, of_row);
  q = scaled(q, by_row ? 1 : scale_factor(spec, in), job.scale);
  FusedTensors x{laid_out(q),
                 laid_out(mapped_on_gpu(spec.features, in.k, in.key_projection, repeats)),
                 laid_out(in.v)};
  x.gate = plain(value_gates(spec, in));
  if (spec.less_log_count) x.centre = plain(log_count(count, in));
  if (const at::Tensor logs = log_gates(spec.decay, in); logs.defined())
    x.decay = (logs.to(at::kDouble).cumsum(-1) + ring.decay_before.unsqueeze(-1)).contiguous();
  const RoundResult r = differentiable(kFusedCuda.name, job, x, forward, backward);
  const at::Tensor N = r.N.narrow(-1, 0, in.v.size(-1));
  return rest.finish(finish(
      spec, in, {N, r.W.unsqueeze(-1), r.shift.detach().unsqueeze(-1), count, /*gates=*/{}}));
}

}  // namespace horner::attn::exec

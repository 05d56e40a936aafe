// A row with near keys has one N and one W, both times e^-shift: of the near keys with exp, and of
// those before them with the variant's weight. Each is a pass over its own interval of keys. The
// rest, from the denominator on, is tensor code.
#include "attn/exec/near_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "attn/exec/autograd.h"
#include "attn/exec/counted_cuda.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/exec/exec.h"
#include "attn/exec/features_cuda.h"
#include "attn/exec/gradients_cuda.h"
#include "attn/kernels/cuda/fused/fused.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;
using cuda::Fused;

namespace {

// One of the two passes.
struct Pass {
  cuda::Weights weights;
  float scale;
  SeenKeys keys;

  bool is_exp() const { return std::holds_alternative<Exp>(weights); }
};

struct NearJob {
  Pass near, far;
  SeenKeys keys;         // of both
  bool gated;            // the decay is of gates
  at::Tensor some_far;   // [1 or B, 1, T]: whether a query sees a key that is not near
  at::Tensor far_first;  // [T]: whether the first key of its mask is not near
  int channels;
  at::Tensor statistics;  // [4, B, H, T] to write to, or undefined
  DropoutOnGpu dropout;
};

struct NearTensors {
  at::Tensor q, k, near_q, near_k, v, gate, decay;

  static auto fields(auto& x) {
    return std::array{&x.q, &x.k, &x.near_q, &x.near_k, &x.v, &x.gate, &x.decay};
  }
  FusedTensors of(const Pass& p) const {
    FusedTensors x;
    x.q = p.is_exp() ? near_q : q, x.k = p.is_exp() ? near_k : k, x.v = v;
    return x;
  }
};

struct NearResult {
  at::Tensor N, W, shift;  // [B, H, T, E], [B, H, T]; float32

  static auto outputs(auto& r) { return std::array{&r.N, &r.W, &r.shift}; }
  static auto saved(auto& r) { return std::array{&r.shift}; }
};

Fused problem(const NearJob& job, const Pass& p, const NearTensors& x, const at::Tensor& decay) {
  cuda::Epilogue epilogue{};
  epilogue.by_sum = p.is_exp();  // the other sum may be near 0
  epilogue.counted = p.keys.seen;
  Fused f = problem_of(x.of(p), epilogue, job.channels);
  f.scale = p.scale, f.clamp = float(kNoClamp), f.seen = p.keys.seen;
  f.gate = memory<float>(x.gate), f.decay = memory<double>(decay);
  f.decay_in_scores = f.decay && p.is_exp();
  f.dropout = job.dropout.pairs;
  return f;
}

// The sums of a pass, and its statistics where those are requested.
struct Part : FusedSums {
  at::Tensor statistics, abs_sum;  // [4, B, H, T], [B, H, T]

  Part(const NearJob& job, const Pass& p, Fused f, const at::TensorOptions& options)
      : FusedSums(f, p.weights, options) {
    if (!job.statistics.defined()) return;
    statistics = at::empty_like(job.statistics), abs_sum = at::empty_like(rows[0]);
    f.statistics = memory<float>(statistics), f.abs_sum = memory<float>(abs_sum);
    cuda::fused_statistics(f, p.weights, stream());
  }
};

// e^-shift, the factor of the weights that are not near; 0 where there are none.
at::Tensor far_factor(const NearJob& job, const at::Tensor& shift) {
  return at::where(job.some_far, (-shift).exp(), 0.0f);
}

// Those of the weights of both, in the proportion a : b.
void write_statistics(const NearJob& job, const Part& near, const Part& far, const at::Tensor& a,
                      const at::Tensor& b) {
  const at::Tensor all = (a + b).clamp_min(1e-30), p = a / all, q = b / all;
  const at::Tensor &x = near.statistics, &y = far.statistics;
  const at::Tensor& to = job.statistics;
  to[0].copy_(p * x[0] + q * y[0] - at::xlogy(p, p) - at::xlogy(q, q));
  to[1].copy_(at::maximum(p * x[1], q * y[1]));
  to[2].copy_(at::where(job.far_first, q * y[2], p * x[2]));
  to[3].copy_(p * x[3] + q * y[3]);
}

NearResult forward(const NearJob& job, const NearTensors& x, bool) {
  const at::Tensor decay = decay_sums(x.decay, job.gated);
  const auto part = [&](const Pass& p) {
    return Part(job, p, problem(job, p, x, decay), x.v.options());
  };
  const Part near = part(job.near), far = part(job.far);
  // The weights that are not near are not to overflow.
  NearResult r;
  r.shift = at::where(job.some_far, near.shift().clamp_min(0), near.shift());
  const at::Tensor by = (near.shift() - r.shift).exp(), rest = far_factor(job, r.shift);
  r.W = near.W() * by + far.W() * rest;
  r.N = near.o * (near.W() * by).unsqueeze(-1) + far.o * rest.unsqueeze(-1);
  if (job.statistics.defined())
    write_statistics(job, near, far, near.abs_sum * by, far.abs_sum * rest);
  if (!job.gated) return r;
  std::vector<at::Tensor> rows{r.N, r.W};
  if (job.statistics.defined())
    for (const at::Tensor& plane : job.statistics.unbind(0)) rows.push_back(plane);
  spoil_rows(x.decay, job.keys.seen, job.keys.lists, rows);
  return r;
}

// The gradients of one pass from g and a `Query` of each row: [B, H, T, 4].
struct PassGradients {
  NearTensors d;
  DecayGradient d_decay;
};
PassGradients pass_gradients(const NearJob& job, const Pass& p, const NearTensors& x,
                             const at::Tensor& decay, const at::Tensor& g,
                             const at::Tensor& queries) {
  Fused f = problem(job, p, x, decay);
  const FusedTensors of = x.of(p);
  NearTensors d;
  const at::Tensor dk = at::empty({f.B, f.G, f.S, f.D}, of.k.options());
  (p.is_exp() ? d.near_k : d.k) = dk;
  d.v = at::empty({f.B, f.G, f.S, f.E}, of.v.options());
  if (x.gate.defined()) d.gate = at::zeros_like(x.gate);
  const DecayGradient d_decay(f, x.decay);
  f.d_o = view(g), f.queries = memory<cuda::Query>(queries);
  f.dk = dk.data_ptr(), f.dv = d.v.data_ptr();
  f.d_gate = memory<float>(d.gate);
  const at::Tensor dq = fused_gradients(f, p.weights, of.q);
  (p.is_exp() ? d.near_q : d.q) = dq.to(of.q.scalar_type());
  return {d, d_decay};
}

NearTensors backward(const NearJob& job, const NearTensors& x, const NearResult& r,
                     const NearResult& grads) {
  if (grads.W.numel() == 0) {
    NearTensors d = x;
    for (at::Tensor* y : NearTensors::fields(d))
      if (y->defined()) *y = at::zeros_like(*y, at::MemoryFormat::Contiguous);
    return d;
  }
  const at::Tensor g = laid_out(grads.N.to(x.v.scalar_type())), dW = grads.W;
  const at::Tensor decay = decay_sums(x.decay, job.gated), rest = far_factor(job, r.shift);
  const float kept = job.dropout.pairs.kept;
  const at::Tensor none = at::zeros_like(dW), no_limit = at::full_like(dW, INFINITY);
  const at::Tensor whole = at::full({dW.size(0), dW.size(1), dW.size(2)}, kept, dW.options());
  if (job.gated) spoil_rows(x.decay, job.keys.seen, job.keys.lists, {whole, rest});
  const float unit = cuda::unit_of_sub(true, g.scalar_type() == at::kFloat);
  const at::Tensor near = at::stack({r.shift * unit, no_limit, whole, dW}, -1);
  const at::Tensor far = at::stack({none, no_limit, rest * kept, dW * rest}, -1);
  auto [d, d_decay] = pass_gradients(job, job.near, x, decay, g, near);
  const auto [more, more_decay] = pass_gradients(job, job.far, x, decay, g, far);
  d.q = more.q, d.k = more.k, d.v += more.v;
  if (d.gate.defined()) d.gate += more.gate;
  // Over both passes a row's sum is near 0: it cancels before anything is rounded.
  if (d_decay.key.defined()) d_decay.key += more_decay.key, d_decay.query += more_decay.query;
  d.decay = d_decay.of_gates(x.decay);
  return d;
}

}  // namespace

at::Tensor attend_near_on_gpu(const Spec& spec, const Inputs& in, Statistics* statistics) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  const int64_t T = in.q.size(2), S = in.k.size(2), repeats = in.q.size(1) / in.k.size(1);
  const int n = int(std::min<int64_t>(std::get<Window>(spec.near).size, S + T));
  const Mask window = Window{n};
  const CountedKeys seen(spec.mask, in), near(window, in);
  NearJob job{{Exp{}, 1, seen_keys(window, in)}, {cuda_weights(spec.weight), 1, {}}};
  job.keys = job.far.keys = seen_keys(spec.mask, in), job.far.keys.seen.ahead = -n;
  job.gated = is<TokenGate>(spec.decay);
  // Where a query sees no near key, the shift is 0 either way.
  job.some_far = (seen.keys() > near.keys()).squeeze(-1);
  const auto [lo, hi] = intervals(spec.mask, in);
  job.far_first = hi - n > lo;
  job.channels = int(in.v.size(-1));
  job.statistics = statistics_memory(in, statistics);
  job.dropout = dropout_on_gpu(spec, in);

  const bool own = !is<Identity>(spec.features);  // near keys have scores of their own
  const double factor = scale_factor(spec, in);
  NearTensors x;
  x.k = laid_out(mapped_on_gpu(spec.features, in.k, in.key_projection, repeats));
  const at::Tensor q = mapped_on_gpu(spec.features, in.q, in.query_projection);
  x.q = laid_out(scaled(q, factor, job.far.scale));
  x.near_k = own ? laid_out(in.k) : x.k;
  const double near_factor = own ? scale_factor({.temperature = spec.temperature}, in) : factor;
  x.near_q = laid_out(scaled(in.q, near_factor, job.near.scale));
  x.v = laid_out(in.v);
  x.gate = plain(value_gates(spec, in)), x.decay = plain(log_gates(spec.decay, in));
  const NearResult r = differentiable(kFusedCuda.name, job, x, forward, backward);
  const at::Tensor N = r.N.narrow(-1, 0, in.v.size(-1));
  Sums sums{N, r.W.unsqueeze(-1), r.shift.detach().unsqueeze(-1), {}, {}};
  sums.far = seen.keys() - near.keys();
  return finish_on_gpu(spec, in, seen, sums);
}

}  // namespace horner::attn::exec

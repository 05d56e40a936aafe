// The part of fused_cpu for rows whose sums need more than a pass: where its weights or its
// sharpness need the whole row. One strip of scores per block of queries, no T x S matrix, forward
// or backward.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attn/exec/cpu.h"
#include "attn/exec/exec.h"
#include "attn/exec/isa.h"
#include "attn/kernels/cpu/rows/rows.h"
#include "attn/parallel.h"
#include "attn/stages.h"

namespace horner::attn::exec {

using kernels::kStrip;
using kernels::Rows;

// What the kernel needs beside the tensors that have gradients.
struct RowJob : torch::CustomClassHolder {
  kernels::RowWeight weight;
  bool adaptive, centred;
  float clamp;
  at::Tensor q, scale;  // [B, H, T, D], [B, H, T, 1]
  at::Tensor lo, hi, keep;
  at::Tensor statistics;  // [4, B, H, T] to write to, or undefined
};

struct OfTheRow {
  kernels::RowWeight operator()(Taylor w) const { return polynomial(w); }
  kernels::RowWeight operator()(Power w) const { return polynomial(w); }
  template <class W>
  kernels::RowWeight operator()(W w) const {
    return w;
  }
};

static at::Tensor transposed(const at::Tensor& x) {  // [B, G, S, C] -> [B, G, blocks, C, kTile]
  const int64_t S = x.size(2), n = kernels::blocks(S);
  const at::Tensor whole = at::constant_pad_nd(x, {0, 0, 0, n * kernels::kTile - S});
  const at::Tensor tiles = whole.view({x.size(0), x.size(1), n, kernels::kTile, x.size(3)});
  return tiles.transpose(-1, -2).contiguous();
}

// The widest strip, in whole tiles, and a tile more: where it is a power of two, the rows of a
// strip would share their places in the caches.
static int64_t stride(const Rows& f) {
  int64_t widest = 0;
  for (int64_t t = 0; t < f.T; t += kStrip)
    widest = std::max<int64_t>(
        widest, f.hi[std::min(t + kStrip, f.T) - 1] - f.lo[t] / kernels::kTile * kernels::kTile);
  return (kernels::blocks(widest) + 1) * kernels::kTile;
}

static Rows problem(const RowJob& job, const at::Tensor& q, const at::Tensor& k,
                    const at::Tensor& v, const at::Tensor& decay) {
  Rows f{};
  f.B = q.size(0), f.H = q.size(1), f.G = k.size(1);
  f.T = q.size(2), f.S = k.size(2), f.D = q.size(3), f.E = v.size(3);
  f.weight = job.weight;
  f.adaptive = job.adaptive, f.centred = job.centred;
  f.clamp = job.clamp;
  f.q = pointer<float>(job.q), f.scale = pointer<float>(job.scale), f.scaled = pointer<float>(q);
  f.k = pointer<float>(k), f.v = pointer<float>(v);
  f.decay = pointer<double>(decay);
  f.lo = pointer<int32_t>(job.lo), f.hi = pointer<int32_t>(job.hi);
  f.keep = reinterpret_cast<const uint8_t*>(pointer<bool>(job.keep));
  f.stride = stride(f);
  return f;
}

struct RowSums : torch::autograd::Function<RowSums> {
  // N, W and the Rows [B, H, T, 4]; the tensors are float32 (decay: double), contiguous, channels
  // padded.
  static std::vector<at::Tensor> forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q,
                                         const at::Tensor& k, const at::Tensor& v,
                                         const std::optional<at::Tensor>& decay,
                                         c10::intrusive_ptr<RowJob> job) {
    const at::Tensor g = decay.value_or(at::Tensor());
    Rows f = problem(*job, q, k, v, g);
    f.statistics = pointer<float>(job->statistics);
    const at::Tensor k_tiles = transposed(k);
    const at::Tensor N = at::empty({f.B, f.H, f.T, f.E}, q.options());
    const at::Tensor W = at::empty({f.B, f.H, f.T, 1}, q.options());
    const at::Tensor rows = at::empty({f.B, f.H, f.T, 4}, q.options());
    f.k_tiles = pointer<float>(k_tiles);
    f.N = pointer<float>(N), f.W = pointer<float>(W);
    f.thresholds = reinterpret_cast<kernels::RowThreshold*>(pointer<float>(rows));
    const kernels::RowKernels& kernel = *isa().rows;
    const int64_t tasks = f.B * f.H * ((f.T + kStrip - 1) / kStrip);
    for_each_task(tasks, 2 * kStrip * f.stride,
                  [&](int64_t i, float* scratch) { kernel.forward(f, i, scratch); });
    ctx->save_for_backward({q, k, v, g, k_tiles, rows});
    ctx->saved_data["job"] = c10::IValue::make_capsule(job);
    ctx->mark_non_differentiable({rows});
    return {N, W, rows};
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    check_first_order("fused_cpu");
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &g = saved[3];
    const auto job = c10::static_intrusive_pointer_cast<RowJob>(ctx->saved_data["job"].toCapsule());
    Rows f = problem(*job, q, k, v, g);
    auto given = [&](const at::Tensor& x, int64_t channels) {
      return x.defined() ? x.contiguous() : at::zeros({f.B, f.H, f.T, channels}, q.options());
    };
    const at::Tensor dN = given(grads[0], f.E), dW = given(grads[1], 1), v_tiles = transposed(v);
    // By the shape alone, so that the same bits come out whatever the number of threads.
    f.parts = std::clamp<int64_t>(16 / std::max<int64_t>(f.B * f.G, 1), 1,
                                  std::max<int64_t>(f.T / kStrip, 1));
    const at::Tensor dq = at::zeros_like(q);
    at::Tensor dk = at::zeros({f.parts, f.B, f.G, f.S, f.D}, q.options());
    at::Tensor dv = at::zeros({f.parts, f.B, f.G, f.S, f.E}, q.options());
    at::Tensor d_query, d_decay;
    if (g.defined()) {
      d_query = at::zeros({f.B, f.H, f.T}, at::kDouble);
      d_decay = at::zeros({f.parts, f.B, f.G, f.S}, at::kDouble);
    }
    f.k_tiles = pointer<float>(saved[4]), f.v_tiles = pointer<float>(v_tiles);
    f.thresholds = reinterpret_cast<kernels::RowThreshold*>(pointer<float>(saved[5]));
    f.dN = pointer<float>(dN), f.dW = pointer<float>(dW);
    f.dq = pointer<float>(dq), f.dk = pointer<float>(dk), f.dv = pointer<float>(dv);
    f.d_decay_query = pointer<double>(d_query), f.d_decay_key = pointer<double>(d_decay);
    const kernels::RowKernels& kernel = *isa().rows;
    for_each_task(f.B * f.G * f.parts, 2 * kStrip * f.stride,
                  [&](int64_t i, float* scratch) { kernel.backward(f, i, scratch); });
    auto whole = [&](const at::Tensor& x) { return f.parts == 1 ? x.select(0, 0) : x.sum(0); };
    if (g.defined()) {
      // A query's own gate sum is that of the key at its position.
      d_decay = whole(d_decay);
      const at::Tensor per_key_head = d_query.view({f.B, f.G, f.H / f.G, f.T}).sum(2);
      const int64_t n = std::min(f.T, f.S);
      d_decay.narrow(2, f.S - n, n) += per_key_head.narrow(2, f.T - n, n);
    }
    return {dq, whole(dk), whole(dv), d_decay, at::Tensor()};
  }
};

at::Tensor attend_by_rows(const Spec& spec, const Inputs& in, Statistics* statistics) {
  const Prepared p(spec, in);
  const at::Tensor plain = p.q.to(at::kFloat), factor = p.factor.to(at::kFloat), q = plain * factor;
  auto job = c10::make_intrusive<RowJob>();
  job->weight = std::visit(OfTheRow{}, spec.weight);
  job->adaptive = is<Adaptive>(spec.sharpness), job->centred = spec.centred;
  job->clamp = spec.clamp;
  job->q = padded(plain.detach());
  job->scale = factor.detach().expand({q.size(0), q.size(1), q.size(2), 1}).contiguous();
  job->statistics = statistics_memory(in, statistics);
  job->lo = p.seen.lo, job->hi = p.seen.hi;
  if (in.keep.defined()) job->keep = in.keep.contiguous();
  const auto decay = p.decay.defined() ? std::optional(p.decay) : std::nullopt;
  const at::Tensor v = spec.input_gate ? in.v * in.input_gate.unsqueeze(-1) : in.v;
  const auto out = RowSums::apply(padded(q), padded(p.k), padded(v), decay, job);
  Sums sums{out[0].narrow(-1, 0, v.size(-1)), out[1], at::zeros({1}, at::kFloat), p.count, {}};
  if (is<Exp>(spec.weight)) sums.shift = out[2].narrow(-1, 1, 1);
  if (is<CumulativeGate>(spec.denominator)) sums.gates = p.gates(in);
  return finish(spec, in, sums);
}

}  // namespace horner::attn::exec

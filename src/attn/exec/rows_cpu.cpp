// The part of fused_cpu for weights and sharpness that depend on the whole row. One strip of scores
// per block of queries, no T x S matrix, forward or backward.
#include <ATen/ATen.h>

#include "attn/exec/autograd.h"
#include "attn/exec/cpu.h"
#include "attn/exec/exec.h"
#include "attn/exec/isa.h"
#include "attn/kernels/cpu/rows/rows.h"
#include "attn/parallel.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

using kernels::kStrip;
using kernels::Rows;

// What the kernels need besides the differentiable tensors.
struct RowJob {
  kernels::RowWeight weight;
  bool adaptive, centred;
  float clamp, softcap;
  at::Tensor q, scale;  // [B, H, T, D], [B, H, T, 1]
  Intervals seen;
  at::Tensor keep;
  Dropout dropout;
  at::Tensor statistics;  // [4, B, H, T] to write to, or undefined
};

static kernels::RowWeight row_weight(const Weight& weight) {
  const auto to_row = [](const auto& w) -> kernels::RowWeight { return w; };
  const KernelWeight<float> kind = kernel_weight<float>(weight);
  if (const auto* w = std::get_if<WholeRow>(&kind)) return std::visit(to_row, *w);
  return std::visit(to_row, std::get<OneScore<float>>(kind));
}

// The widest strip, in whole tiles, plus one tile: rows a power of two apart would share cache
// sets.
static int64_t stride(const Rows& f) {
  int64_t widest = 0;
  const kernels::SeenKeys& k = f.seen;
  const int32_t* first = k.from ? k.from : k.lo;
  for (int64_t b = 0; b < (k.per_batch ? f.B : 1); ++b)
    for (int64_t t = 0; t < f.T; t += kStrip)
      widest = std::max<int64_t>(widest, k.hi[b * k.per_batch + std::min(t + kStrip, f.T) - 1] -
                                             first[t] / kernels::kTile * kernels::kTile);
  return (kernels::blocks(widest) + 1) * kernels::kTile;
}

// float32, decay in double; contiguous, channels padded. decay and bias may be undefined.
struct RowTensors {
  at::Tensor q, k, v, decay, bias;

  static auto fields(auto& x) { return std::array{&x.q, &x.k, &x.v, &x.decay, &x.bias}; }
};

struct RowResult {
  at::Tensor N, W;
  at::Tensor thresholds;  // [B, H, T, 4], without gradients
  at::Tensor k_tiles;

  static auto outputs(auto& r) { return std::array{&r.N, &r.W, &r.thresholds}; }
  static auto saved(auto& r) { return std::array{&r.thresholds, &r.k_tiles}; }
};

static Rows problem(const RowJob& job, const RowTensors& x, const at::Tensor& thresholds) {
  Rows f{};
  f.B = x.q.size(0), f.H = x.q.size(1), f.G = x.k.size(1);
  f.T = x.q.size(2), f.S = x.k.size(2), f.D = x.q.size(3), f.E = x.v.size(3);
  f.weight = job.weight;
  f.adaptive = job.adaptive, f.centred = job.centred;
  f.clamp = job.clamp, f.softcap = job.softcap;
  f.q = pointer<float>(job.q), f.scale = pointer<float>(job.scale), f.scaled = pointer<float>(x.q);
  f.k = pointer<float>(x.k), f.v = pointer<float>(x.v);
  f.decay = pointer<double>(x.decay);
  set_bias(f, x.bias);
  f.seen = job.seen.pointers();
  f.keep = reinterpret_cast<const uint8_t*>(pointer<bool>(job.keep));
  f.dropout = job.dropout;
  f.thresholds = reinterpret_cast<kernels::RowThreshold*>(pointer<float>(thresholds));
  f.stride = stride(f);
  return f;
}

static RowResult forward(const RowJob& job, const RowTensors& x, bool) {
  const int64_t B = x.q.size(0), H = x.q.size(1), T = x.q.size(2);
  const RowResult r{at::empty({B, H, T, x.v.size(3)}, x.q.options()),
                    at::empty({B, H, T, 1}, x.q.options()), at::empty({B, H, T, 4}, x.q.options()),
                    transposed(x.k)};
  Rows f = problem(job, x, r.thresholds);
  f.statistics = pointer<float>(job.statistics);
  f.k_tiles = pointer<float>(r.k_tiles), f.N = pointer<float>(r.N), f.W = pointer<float>(r.W);
  const kernels::RowKernels& kernel = *isa().rows;
  for_each_task(f.B * f.H * ((f.T + kStrip - 1) / kStrip), (2 * kStrip + 2) * f.stride,
                [&](int64_t i, float* scratch) { kernel.forward(f, i, scratch); });
  return r;
}

static RowTensors backward(const RowJob& job, const RowTensors& x, const RowResult& r,
                           const RowResult& grads) {
  Rows f = problem(job, x, r.thresholds);
  const at::Tensor dN = grads.N.contiguous(), dW = grads.W.contiguous(), v_tiles = transposed(x.v);
  // From the shape alone: the number of threads does not change the bits of the result.
  const at::Tensor d_bias = bias_gradient(x.bias);
  const KeyHeads heads(f.B, f.G, d_bias);
  f.parts = std::clamp<int64_t>(16 / std::max<int64_t>(heads.at_once(), 1), 1,
                                std::max<int64_t>(f.T / kStrip, 1));
  RowTensors d{at::zeros_like(x.q), at::zeros({f.parts, f.B, f.G, f.S, f.D}, x.q.options()),
               at::zeros({f.parts, f.B, f.G, f.S, f.E}, x.q.options())};
  d.bias = d_bias;
  at::Tensor d_query;
  if (x.decay.defined()) {
    d_query = at::zeros({f.B, f.H, f.T}, at::kDouble);
    d.decay = at::zeros({f.parts, f.B, f.G, f.S}, at::kDouble);
  }
  f.k_tiles = pointer<float>(r.k_tiles), f.v_tiles = pointer<float>(v_tiles);
  f.dN = pointer<float>(dN), f.dW = pointer<float>(dW);
  f.dq = pointer<float>(d.q), f.dk = pointer<float>(d.k), f.dv = pointer<float>(d.v);
  f.d_decay_query = pointer<double>(d_query), f.d_decay_key = pointer<double>(d.decay);
  f.d_bias = pointer<float>(d_bias);
  const kernels::RowKernels& kernel = *isa().rows;
  for (int64_t turn = 0; turn < heads.turns(); ++turn)
    for_each_task(
        heads.at_once() * f.parts, (2 * kStrip + 2) * f.stride, [&](int64_t i, float* scratch) {
          kernel.backward(f, heads.head(turn, i / f.parts) * f.parts + i % f.parts, scratch);
        });
  for (at::Tensor* y : {&d.k, &d.v, &d.decay})
    if (y->defined()) *y = f.parts == 1 ? y->select(0, 0) : y->sum(0);
  if (x.decay.defined()) add_query_decay(d.decay, d_query);
  return d;
}

at::Tensor attend_by_rows(const Spec& spec, const Inputs& in, Statistics* statistics) {
  const Prepared p(spec, in);
  const at::Tensor plain = p.q.to(at::kFloat), factor = p.factor.to(at::kFloat), q = plain * factor;
  RowJob job{.seen = p.seen};
  job.weight = row_weight(spec.weight);
  job.adaptive = sharpness_from(spec.sharpness) == SharpnessFrom::entropy,
  job.centred = spec.centred;
  job.clamp = spec.clamp, job.softcap = float(spec.softcap);
  job.q = padded(plain.detach());
  job.scale = factor.detach().expand({q.size(0), q.size(1), q.size(2), 1}).contiguous();
  job.dropout = dropout(spec, in);
  job.statistics = statistics_memory(in, statistics);
  if (in.keep.defined()) job.keep = in.keep.contiguous();
  const at::Tensor gates = value_gates(spec, in);
  const at::Tensor v = gates.defined() ? in.v * gates.unsqueeze(-1) : in.v;
  const RowTensors x{padded(q), padded(p.k), padded(v), p.decay, attn::plain(in.bias)};
  const RowResult r = differentiable("fused_cpu", job, x, forward, backward);
  Sums sums{r.N.narrow(-1, 0, v.size(-1)), r.W, at::zeros({1}, at::kFloat), p.count, {}};
  if (is<Exp>(spec.weight) || is<Softpick>(spec.weight))
    sums.shift = r.thresholds.detach().narrow(-1, 1, 1);
  if (statistics && is<Exp>(spec.weight)) statistics->log_sum = log_sum(sums);
  if (in.denominator_gate.defined()) sums.gates = p.gates(in);
  return finish(spec, in, sums);
}

c10::SymInt kept_by_rows(const Spec& spec, const Inputs& in) {
  const std::optional<int64_t> D = in.k.sym_size(3).maybe_as_int();
  if (!D) return 0;
  const c10::SymInt rows = in.q.sym_size(0) * in.q.sym_size(1) * in.q.sym_size(2);
  const c10::SymInt keys = in.k.sym_size(0) * in.k.sym_size(1) *
                           (in.k.sym_size(2) + kernels::kTile) * padded(mapped_channels(spec, *D));
  return kept_bytes(rows * padded(in.v.sym_size(3)), sizeof(float)) +
         kept_bytes(rows, sizeof(float)) + kept_bytes(rows * 4, sizeof(float)) * 2 +
         kept_bytes(keys, sizeof(float));
}

}  // namespace horner::attn::exec

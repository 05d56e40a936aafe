// One pass over tiles of keys, on the CPU: no T x S matrix, forward or backward. Tensor code before
// the kernels computes the features and the centre.
#include "attn/exec/fused_cpu.h"

#include <ATen/ATen.h>

#include "attn/exec/delta.h"
#include "attn/exec/exec.h"
#include "attn/exec/isa.h"
#include "attn/parallel.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

using kernels::Fused;

static uint32_t* words(const at::Tensor& x) {  // its memory as 32-bit words
  return x.defined() ? static_cast<uint32_t*>(x.data_ptr()) : nullptr;
}

// [B, G, S, C] -> [B, G, blocks, kTile / 2, C], of pairs of neighbours in a column.
static at::Tensor column_pairs(const at::Tensor& x) {
  const int64_t S = x.size(2), C = x.size(3), n = kernels::blocks(S), half = kernels::kTile / 2;
  const at::Tensor pairs = at::zeros({x.size(0), x.size(1), n, half, C}, at::kInt);
  const auto* from = static_cast<const uint16_t*>(x.const_data_ptr());
  uint32_t* to = words(pairs);
  const kernels::FusedKernels& k = *isa().fused_bf16;
  for_each_task(x.size(0) * x.size(1) * n, [&](int64_t i) {
    k.pair_columns({from + i / n * S * C, to + i / n * n * half * C, S, C}, i % n);
  });
  return pairs;
}

// q, k, v in float32 or all in bfloat16, decay in double, the rest in float32; contiguous, channels
// padded.
static Fused problem(const TileJob& job, const FusedTensors& x) {
  Fused f{};
  f.B = x.q.size(0), f.H = x.q.size(1), f.G = x.k.size(1);
  f.T = x.q.size(2), f.S = x.k.size(2), f.D = x.q.size(3), f.E = x.v.size(3);
  f.weight = job.weight;
  f.clamp = job.clamp, f.scale = job.scale, f.softcap = job.softcap, f.near = job.near;
  if (is_paired(x.q))
    f.pairs.q = words(x.q), f.pairs.k = words(x.k), f.pairs.v = words(x.v);
  else
    f.q = pointer<float>(x.q), f.k = pointer<float>(x.k), f.v = pointer<float>(x.v);
  f.in_gate = pointer<float>(x.gate), f.centre = pointer<float>(x.centre),
  f.decay = pointer<double>(x.decay), f.query_decay = pointer<double>(job.query_decay);
  f.seen = job.seen.pointers();
  set_bias(f, x.bias);
  f.keep = reinterpret_cast<const uint8_t*>(pointer<bool>(job.keep));
  f.dropout = job.dropout;
  f.epilogue = job.epilogue;
  f.epilogue.divisor = pointer<float>(x.divisor), f.epilogue.sink = pointer<float>(x.sink);
  f.epilogue.out_gate = pointer<float>(x.out_gate),
  f.epilogue.post_gate = pointer<float>(x.post_gate);
  f.epilogue.norm_weight = pointer<float>(x.norm_weight);
  f.epilogue.norm_bias = pointer<float>(x.norm_bias);
  return f;
}

static const kernels::FusedKernels& kernels_for(const FusedTensors& x) {
  return is_paired(x.q) ? *isa().fused_bf16 : *isa().fused;
}

TileResult tiles_forward(const TileJob& job, const FusedTensors& x, bool for_backward) {
  Fused f = problem(job, x);
  f.statistics = pointer<float>(job.statistics);
  TileResult r;
  const at::Tensor k_tiles = transposed(x.k);
  r.o = at::empty({f.B, f.H, f.T, f.E}, at::kFloat);
  at::Tensor v_columns;
  if (is_paired(x.q)) {
    v_columns = column_pairs(x.v);
    f.pairs.k_tiles = words(k_tiles), f.pairs.v_columns = words(v_columns);
  }
  if (for_backward || job.log_sum.defined()) {
    r.N = at::empty_like(r.o);
    r.W = at::empty({f.B, f.H, f.T}, at::kFloat), r.shift = at::empty_like(r.W);
  }
  f.k_tiles = pointer<float>(k_tiles), f.o = pointer<float>(r.o);
  f.N = pointer<float>(r.N), f.W = pointer<float>(r.W), f.shift = pointer<float>(r.shift);
  const kernels::FusedKernels& kernel = kernels_for(x);
  for_each_task(f.B * f.H * kernels::blocks(f.T), [&](int64_t i) { kernel.forward(f, i); });
  if (job.log_sum.defined()) job.log_sum.copy_(r.W).log_().add_(r.shift);
  return r;
}

FusedTensors tiles_backward(const TileJob& job, const FusedTensors& x, const TileResult& r,
                            const TileResult& grads) {
  Fused f = problem(job, x);
  const auto zeros_like = [](const at::Tensor& x) { return x.defined() ? at::zeros_like(x) : x; };
  const int64_t tasks = f.B * f.H * kernels::blocks(f.T);
  // From the shape alone: the number of threads does not change the bits of the result.
  const at::Tensor d_bias = bias_gradient(x.bias);
  const KeyHeads heads(f.B, f.G, d_bias);
  f.parts = std::min(16 / std::max<int64_t>(1, heads.at_once()), kernels::blocks(f.S));
  f.parts = std::max<int64_t>(f.parts, 1);
  const at::Tensor d_o = grads.o.to(at::kFloat).contiguous(), dW = at::empty_like(r.W);
  FusedTensors d{at::empty_like(x.q, at::kFloat), at::empty_like(x.k, at::kFloat),
                 at::empty_like(x.v, at::kFloat), zeros_like(x.centre)};
  d.gate = zeros_like(x.gate), d.divisor = zeros_like(x.divisor), d.sink = zeros_like(x.sink);
  d.bias = d_bias;
  d.out_gate = zeros_like(x.out_gate), d.post_gate = zeros_like(x.post_gate);
  if (x.norm_weight.defined()) d.norm_weight = at::zeros({tasks, f.E}, at::kFloat);
  if (x.norm_bias.defined()) d.norm_bias = at::zeros({tasks, f.E}, at::kFloat);
  at::Tensor d_query;
  if (x.decay.defined()) {
    d_query = at::zeros({f.B, f.H, f.T}, x.decay.options());
    d.decay = at::zeros_like(x.decay);
  }
  at::Tensor dN, q_columns, dN_pairs, dN_columns;
  if (!is_paired(x.q)) {
    dN = at::empty_like(d_o);
  } else {
    q_columns = column_pairs(x.q);
    dN_pairs = at::empty({f.B, f.H, f.T, f.E / 2}, at::kInt);
    dN_columns = at::empty({f.B, f.H, kernels::blocks(f.T), kernels::kTile / 2, f.E}, at::kInt);
    f.pairs.q_columns = words(q_columns);
    f.pairs.dN = words(dN_pairs), f.pairs.dN_columns = words(dN_columns);
  }
  f.N = pointer<float>(r.N), f.W = pointer<float>(r.W), f.shift = pointer<float>(r.shift);
  f.d_o = pointer<float>(d_o), f.dN = pointer<float>(dN), f.dW = pointer<float>(dW);
  f.dq = pointer<float>(d.q), f.dk = pointer<float>(d.k), f.dv = pointer<float>(d.v);
  f.d_in_gate = pointer<float>(d.gate), f.d_centre = pointer<float>(d.centre);
  f.d_decay_query = pointer<double>(d_query), f.d_decay_key = pointer<double>(d.decay);
  kernels::Epilogue& p = f.epilogue;
  p.d_divisor = pointer<float>(d.divisor), p.d_sink = pointer<float>(d.sink);
  f.d_bias = pointer<float>(d.bias);
  p.d_out_gate = pointer<float>(d.out_gate), p.d_post_gate = pointer<float>(d.post_gate);
  p.d_norm_weight = pointer<float>(d.norm_weight), p.d_norm_bias = pointer<float>(d.norm_bias);
  const kernels::FusedKernels& kernel = kernels_for(x);
  for_each_task(tasks, [&](int64_t i) { kernel.rows(f, i); });
  for (int64_t turn = 0; turn < heads.turns(); ++turn)
    for (int64_t r = 0; r < f.parts; ++r)
      for_each_task(heads.at_once() * f.parts, [&](int64_t i) {
        kernel.backward(f, r, heads.head(turn, i / f.parts) * f.parts + i % f.parts);
      });

  for (at::Tensor* sum : {&d.norm_weight, &d.norm_bias})
    if (sum->defined()) *sum = sum->sum(0);
  if (x.decay.defined())
    add_query_decay(job.query_decay.defined() ? job.d_query_decay : d.decay, d_query);
  return d;
}

// Whether the denominator needs the number of keys, or a sum over them.
struct CountsKeys {
  bool operator()(Sum z) const { return z.floor != 0; }
  bool operator()(Nothing) const { return false; }
  bool operator()(Count) const { return true; }
  bool operator()(CumulativeGate) const { return true; }
};

// Tells the kernel to divide by the sum, with the least of each row where it has one, or gives
// another divisor of each row; undefined for 1.
struct Divisor {
  const Inputs& in;
  const Prepared& p;
  const at::Tensor& far;  // the number of keys that are not near
  kernels::Epilogue& epilogue;

  at::Tensor operator()(Sum z) const {
    epilogue.by_sum = true;
    epilogue.plus = z.plus, epilogue.least = z.least, epilogue.detach = z.detach;
    return z.floor == 0 ? at::Tensor() : by_row(z.floor * far.squeeze(-1));
  }
  at::Tensor operator()(Nothing) const { return {}; }
  at::Tensor operator()(Count) const { return by_row(count()); }
  at::Tensor operator()(CumulativeGate z) const {
    const at::Tensor Z = p.gates(in).squeeze(-1).clamp_min(z.least == 0 ? 1e-6 : z.least);
    return by_row(z.times_count ? Z * count() : Z);
  }
  at::Tensor count() const { return p.count.clamp_min(1).squeeze(-1); }  // [1 or B, 1, T]
  at::Tensor by_row(const at::Tensor& x) const {                         // [B, H, T]
    return plain(x.expand({in.q.size(0), in.q.size(1), in.q.size(2)}));
  }
};

// Whether the kernels of bfloat16 pairs run. A sum of relu's features may be close to 0, where
// weights and gradients that are rounded do not cancel any more.
static bool in_pairs(const Spec& spec, const Inputs& in) {
  const bool small_sums = is<Relu>(spec.features) && is<Sum>(spec.denominator);
  return isa().fused_bf16 && is_paired(in.q) && !small_sums;
}

bool counts_keys(const Spec& spec) {
  return spec.centred || spec.less_log_count || std::visit(CountsKeys{}, spec.denominator);
}

std::pair<TileJob, FusedTensors> tiles_of(const Spec& spec, const Inputs& in, const Prepared& p) {
  TileJob job{.seen = p.seen};
  job.weight = one_score<float>(spec.weight);
  job.clamp = spec.clamp, job.softcap = float(spec.softcap);
  if (const auto* near = std::get_if<Window>(&spec.near)) job.near = near->size;
  job.scale = float(p.one_factor.value_or(1));
  if (in.keep.defined()) job.keep = in.keep.contiguous();
  job.dropout = dropout(spec, in);
  kernels::Epilogue& epilogue = job.epilogue;
  epilogue.channels = in.v.size(-1);
  Intervals far = p.seen;
  at::Tensor far_count = p.count;
  if (job.near != 0 && counts_keys(spec)) {
    far = p.seen.before_last(job.near);
    far_count = far.sums(p.ones).to(p.count.scalar_type());
  }
  const at::Tensor divisor = std::visit(Divisor{in, p, far_count, epilogue}, spec.denominator);
  std::visit(SetNorm<kernels::Epilogue>{epilogue}, spec.norm);

  const at::Tensor q = p.one_factor ? p.q : p.q * p.factor;
  const auto dtype = in_pairs(spec, in) ? at::kBFloat16 : at::kFloat;
  FusedTensors x{padded(q, dtype), padded(p.k, dtype), padded(in.v, dtype)};
  if (spec.centred) {  // the query times the mean key
    const at::Tensor mean = far.sums(p.kept_keys()) / far_count.clamp_min(1);
    const at::Tensor per_head = mean.to(at::kFloat).repeat_interleave(p.repeats, 1);
    x.centre = plain((q * per_head).sum(-1) * job.scale);
  }
  if (spec.less_log_count) {
    const at::Tensor log = log_count(p.count, in);
    x.centre = x.centre.defined() ? x.centre + log : plain(log);
  }
  x.gate = plain(value_gates(spec, in));
  x.decay = p.decay;
  x.divisor = divisor;
  x.sink = sink_of_rows(in);
  x.bias = plain(in.bias);
  x.out_gate = plain(in.output_gate), x.post_gate = plain(in.post_gate);
  x.norm_weight = padded(in.norm_weight), x.norm_bias = padded(in.norm_bias);
  return {job, x};
}

static at::Tensor run(const Spec& given, const Inputs& inputs, Statistics* statistics) {
  if (is<Delta>(given.values)) {
    const auto [spec, in] = with_corrected_values("fused_cpu", given, inputs);
    return run(spec, in, statistics);
  }
  if (needs_the_row(given)) return attend_by_rows(given, inputs, statistics);
  const WithoutChannelGates rest(given, inputs);
  const Inputs& in = rest.in;
  auto [job, x] = tiles_of(rest.spec, in, Prepared(rest.spec, in, {}, counts_keys(rest.spec)));
  job.statistics = statistics_memory(in, statistics);
  if (statistics && statistics->only_log_sum)
    job.log_sum = statistics->log_sum = log_sum_memory(in);
  const bool last = !rest.after.defined();
  at::Tensor o = differentiable("fused_cpu", job, x, tiles_forward, tiles_backward, last).o;
  if (o.size(-1) > in.v.size(-1)) o = o.narrow(-1, 0, in.v.size(-1));
  o = rest.finish(o);
  return o.scalar_type() == in.q.scalar_type() ? o : o.to(in.q.scalar_type());
}

// bfloat16 takes half the time of float32.
static double work(const Spec& spec, const Inputs& in) {
  const double each = work_in_tiles(spec, in.q.size(2), in.k.size(2), in.q.size(-1), in.v.size(-1));
  return double(in.q.size(0) * in.q.size(1)) * each / (in_pairs(spec, in) ? 2 : 1);
}

// N, W and shift; of o the shape, or what the gradient of a gate of channels needs.
static c10::SymInt kept(const Spec& spec, const Inputs& in) {
  if (needs_the_row(spec)) {
    if (!in.k.sym_size(3).maybe_as_int()) return 0;
    return kept_corrected(spec, in) + kept_by_rows(spec, in);
  }
  const c10::SymInt rows = in.q.sym_size(0) * in.q.sym_size(1) * in.q.sym_size(2);
  const c10::SymInt values = kept_bytes(rows * padded(in.v.sym_size(3)), sizeof(float));
  return kept_corrected(spec, in) + (spec.channel_gates ? values : kept_bytes(0, 1)) + values +
         kept_bytes(rows, sizeof(float)) * 2;
}

static std::string why_not(const Spec& spec, const Inputs& in) {
  if (!in.q.is_cpu()) return "the inputs are not on the CPU";
  const auto dtype = in.q.scalar_type();
  if (dtype == at::kDouble) return "supports only float32, bfloat16 and float16";
  constexpr Has kHas{.softcap = true,
                     .bias = true,
                     .sink = true,
                     .near = true,
                     .delta = true,
                     .dropout = true,
                     .first_keys = true,
                     .softpick = true,
                     .stick = true};
  if (const std::string lacks = why_lacking(spec, kHas); !lacks.empty()) return lacks;
  if (!is<NoKeys>(spec.near) && !is<Identity>(spec.features))
    return "does not support near keys beside features: they have scores of their own";
  if (const std::string lacks = WithoutChannelGates::why_not(spec);
      !lacks.empty() && !needs_the_row(spec))
    return lacks;
  const int64_t widest = std::max(mapped_channels(spec, in.q.size(-1)), in.v.size(-1));
  if (widest > kernels::kMostChannels && !needs_the_row(spec))
    return "supports head dimensions up to 256";
  return "";
}

const Execution fused_cpu{
    .name = "fused_cpu",
    .about = "one pass over tiles of keys, on the CPU",
    .why_not = why_not,
    .run = run,
    .work = work,
    .kept = kept,
};

}  // namespace horner::attn::exec

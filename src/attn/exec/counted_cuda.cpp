#include "attn/exec/counted_cuda.h"

#include <ATen/ATen.h>

#include "attn/exec/autograd.h"
#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/prepare/counts.h"
#include "attn/stages.h"
#include "core/check.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

struct RowInput {  // gates [B, G, S], or a learned parameter per head
  at::Tensor x;

  static auto fields(auto& t) { return std::array{&t.x}; }
};

// A problem of kernels/cuda/prepare/counts.h, without its pointers.
template <class Problem>
struct CountedJob {
  Problem p{};
  SeenKeys keys;

  CountedJob(const Spec& spec, const Inputs& in) : keys(seen_keys(spec.mask, in)) {
    p.B = int(in.q.size(0)), p.H = int(in.q.size(1));
    p.seen = keys.seen;
  }
};

static void launch(cuda::GateSums p, const at::Tensor& gates, float* y, const float* dy,
                   const at::Tensor& dx) {
  p.gates = typed(gates), p.d_gates = typed(dx), p.divisor = y, p.d_divisor = dy;
  const at::Tensor scratch =
      at::empty({p.B * p.G * cuda::gate_scratch(p)}, gates.options().dtype(at::kDouble));
  p.scratch = memory<double>(scratch);
  (y ? cuda::gate_divisor : cuda::gate_divisor_backward)(p, stream());
}
static void launch(cuda::CountedRows p, const at::Tensor& learned, float* y, const float* dy,
                   const at::Tensor& dx) {
  p.learned = typed(learned), p.d_learned = typed(dx);
  p.value = y, p.d_value = dy;
  (y ? cuda::counted_rows : cuda::counted_rows_backward)(p, stream());
}

template <class Problem>
static Output forward(const CountedJob<Problem>& job, const RowInput& in, bool) {
  const Problem& p = job.p;
  const at::Tensor y = at::empty({p.B, p.H, p.seen.T}, in.x.options().dtype(at::kFloat));
  if (y.numel() > 0) launch(p, in.x, memory<float>(y), nullptr, {});
  return {y};
}
template <class Problem>
static RowInput backward(const CountedJob<Problem>& job, const RowInput& in, const Output&,
                         const Output& grads) {
  if (grads.y.numel() == 0) return {at::zeros_like(in.x)};
  const at::Tensor dx = at::empty_like(in.x), dy = plain(grads.y);
  launch(job.p, in.x, nullptr, memory<float>(dy), dx);
  return {dx};
}
template <class Problem>
static at::Tensor counted_rows(const CountedJob<Problem>& job, const at::Tensor& x) {
  return differentiable("the CUDA kernels", job, RowInput{gates(x)}, forward<Problem>,
                        backward<Problem>)
      .y;
}

static at::Tensor decay_scratch(cuda::DecaySums& p, const at::Tensor& gates) {
  const at::Tensor scratch = at::empty({p.B, p.G, p.parts()}, gates.options().dtype(at::kDouble));
  p.scratch = memory<double>(scratch);
  return scratch;
}
static cuda::DecaySums decay_problem(const at::Tensor& gates) {
  return {.B = int(gates.size(0)), .G = int(gates.size(1)), .S = int(gates.size(2))};
}
at::Tensor decay_sums(const at::Tensor& gates, bool skips_nan) {
  if (!gates.defined()) return {};
  const at::Tensor sums = at::empty(gates.sizes(), gates.options().dtype(at::kDouble));
  cuda::DecaySums p = decay_problem(gates);
  const at::Tensor scratch = decay_scratch(p, gates);
  p.gates = typed(gates), p.skips_nan = skips_nan, p.sums = memory<double>(sums);
  cuda::decay_sums(p, stream());
  return sums;
}
void spoil_rows(const at::Tensor& gates, const cuda::Seen& seen, const cuda::SeenLists& lists,
                at::TensorList rows, at::TensorList by_last) {
  if (rows[0].numel() == 0) return;
  cuda::SpoiledRows p{.B = int(gates.size(0)), .G = int(gates.size(1)), .seen = seen};
  p.lists = lists, p.gates = typed(gates), p.H = int(rows[0].size(1));
  const at::Tensor counts = at::empty(gates.sizes(), gates.options().dtype(at::kInt));
  p.counts = memory<int>(counts);
  int n = 0;
  const auto add = [&](const at::Tensor& x, bool last) {
    if (!x.defined()) return;
    check(n < cuda::SpoiledRows::kMost, "too many tensors of rows");
    p.rows[n++] = {typed(x), int(x.numel() / (int64_t(p.B) * p.H * seen.T)), last};
  };
  for (const at::Tensor& x : rows) add(x, false);
  for (const at::Tensor& x : by_last) add(x, true);
  cuda::spoil_rows(p, stream());
}
DecayGradient::DecayGradient(cuda::Fused& f, const at::Tensor& gates) {
  if (!gates.defined() || !gates.requires_grad()) return;
  const auto dtype = f.dtype == cuda::Dtype::float32 ? at::kDouble : at::kFloat;
  query = at::zeros({f.B, f.H, f.T}, gates.options().dtype(dtype));
  key = at::empty({f.B, f.G, f.S}, gates.options().dtype(at::kDouble));
  f.d_decay_query = memory<void>(query), f.d_decay_key = memory<double>(key);
}
at::Tensor DecayGradient::of_gates(const at::Tensor& gates, const at::Tensor& after,
                                   int part) const {
  if (!key.defined()) return {};
  const at::Tensor d_gates = at::empty_like(gates);
  cuda::DecaySums p = decay_problem(gates);
  if (after.defined()) p.part = part, p.d_after = memory<double>(after);
  const at::Tensor scratch = decay_scratch(p, gates);
  p.H = int(query.size(1)), p.T = int(query.size(2));
  p.d_key = memory<double>(key), p.d_query = query.data_ptr();
  p.is_double = query.scalar_type() == at::kDouble;
  p.d_gates = typed(d_gates);
  cuda::decay_sums_backward(p, stream());
  return d_gates;
}

// Whether tensor code counts keys: the kernels know intervals only.
static bool by_tensors(const Spec& spec, const Inputs& in) {
  return in.keep.defined() || is_listed(spec.mask, in);
}
static at::Tensor by_row(const Inputs& in, const at::Tensor& x) {  // from [.., T, 1] to [B, H, T]
  return plain(x.squeeze(-1).expand({in.q.size(0), in.q.size(1), in.q.size(2)}));
}

struct DivisorOnGpu {
  const Spec& spec;
  const Inputs& in;
  const CountedKeys& counted;

  at::Tensor operator()(Sum z) const { return z.floor == 0 ? at::Tensor() : (*this)(Count{}); }
  at::Tensor operator()(Nothing) const { return {}; }
  at::Tensor operator()(Count) const {
    return by_tensors(spec, in) ? by_row(in, counted.count()) : at::Tensor();  // the kernels count
  }
  at::Tensor operator()(CumulativeGate z) const {
    if (is_listed(spec.mask, in)) return over_lists(z);
    CountedJob<cuda::GateSums> job(spec, in);
    job.p.G = int(in.k.size(1)), job.p.least = float(z.least), job.p.times_count = z.times_count;
    return counted_rows(job, in.denominator_gate);
  }
  at::Tensor over_lists(CumulativeGate z) const {
    at::Tensor share = in.denominator_gate.to(at::kDouble).exp().unsqueeze(-1);
    if (in.keep.defined())
      share = share.masked_fill(in.keep.logical_not().unsqueeze(1).unsqueeze(3), 0);
    const at::Tensor sums = sums_over_keys(keys_seen(spec.mask, in), share).to(at::kFloat);
    at::Tensor Z = sums.clamp_min(z.least == 0 ? 1e-6 : z.least);
    if (z.times_count) Z = Z * counted.count();
    return by_row(in, Z.repeat_interleave(in.q.size(1) / in.k.size(1), 1));
  }
};
at::Tensor divisor_on_gpu(const Spec& spec, const Inputs& in, const CountedKeys& counted) {
  return std::visit(DivisorOnGpu{spec, in, counted}, spec.denominator);
}

at::Tensor scale_on_gpu(const Spec& spec, const Inputs& in, const CountedKeys& counted) {
  if (!is<LogLength>(spec.sharpness) || by_tensors(spec, in))
    return scale(spec, in, counted.count().to(at::kDouble)).to(at::kFloat);
  CountedJob<cuda::CountedRows> job(spec, in);
  job.p.scale = float(scale_factor(spec, in));
  return counted_rows(job, in.length_scale).unsqueeze(-1);
}
at::Tensor log_count_on_gpu(const Spec& spec, const Inputs& in, const CountedKeys& counted) {
  if (by_tensors(spec, in)) return plain(log_count(counted.keys(), in));
  CountedJob<cuda::CountedRows> job(spec, in);
  const at::Tensor y =
      at::empty({job.p.B, job.p.H, job.p.seen.T}, in.q.options().dtype(at::kFloat));
  job.p.scale = 1;
  if (y.numel() > 0) launch(job.p, {}, memory<float>(y), nullptr, {});
  return y;
}

at::Tensor finish_on_gpu(const Spec& given, const Inputs& in, const CountedKeys& counted,
                         Sums sums) {
  Spec spec = given;
  sums.count = counted.count();
  if (is<CumulativeGate>(spec.denominator)) {
    sums.N = sums.N / divisor_on_gpu(spec, in, counted).unsqueeze(-1);
    spec.denominator = Nothing{};
  }
  return finish(spec, in, sums);
}

}  // namespace horner::attn::exec

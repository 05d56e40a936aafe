#include "attn/exec/counted_cuda.h"

#include <ATen/ATen.h>

#include "attn/exec/autograd.h"
#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/prepare/counts.h"
#include "attn/stages.h"

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

// The running sums of the gates, or with `backward` the gradient of the gates from that of the sums
// (double).
static at::Tensor decay_sums(const at::Tensor& x, at::ScalarType to, bool backward) {
  const at::Tensor y = at::empty(x.sizes(), x.options().dtype(to));
  cuda::DecaySums p{int(x.size(0)), int(x.size(1)), int(x.size(2))};
  const at::Tensor scratch = at::empty({p.B, p.G, p.parts()}, x.options().dtype(at::kDouble));
  p.scratch = memory<double>(scratch);
  if (backward) {
    p.d_sums = memory<double>(x), p.d_gates = typed(y);
    cuda::decay_sums_backward(p, stream());
  } else {
    p.gates = typed(x), p.sums = memory<double>(y);
    cuda::decay_sums(p, stream());
  }
  return y;
}
struct DecayJob {};
static Output decay_forward(const DecayJob&, const RowInput& in, bool) {
  return {decay_sums(in.x, at::kDouble, false)};
}
static RowInput decay_backward(const DecayJob&, const RowInput& in, const Output&,
                               const Output& grads) {
  return {decay_sums(grads.y.contiguous(), in.x.scalar_type(), true)};
}
at::Tensor decay_on_gpu(const at::Tensor& gates) {
  if (!gates.defined()) return gates;
  return differentiable("the CUDA kernels", DecayJob{}, RowInput{exec::gates(gates)}, decay_forward,
                        decay_backward)
      .y;
}

static at::Tensor by_count(const Spec& spec, const Inputs& in, cuda::CountedRows::Kind kind,
                           const at::Tensor& learned) {
  CountedJob<cuda::CountedRows> job(spec, in);
  job.p.kind = kind, job.p.scale = float(scale_factor(spec, in));
  return counted_rows(job, learned);
}

struct DivisorOnGpu {
  const Spec& spec;
  const Inputs& in;
  const CountedKeys& counted;

  at::Tensor operator()(Sum) const { return {}; }
  at::Tensor operator()(Nothing) const { return {}; }
  at::Tensor operator()(Count) const {
    return in.keep.defined() ? by_row(counted.count()) : at::Tensor();  // the kernels count
  }
  at::Tensor operator()(CountPower) const {
    if (!in.keep.defined())
      return by_count(spec, in, cuda::CountedRows::count_power, in.count_exponent);
    return by_row(counted.count().pow(in.count_exponent.sigmoid().view({-1, 1, 1})));
  }
  at::Tensor operator()(CumulativeGate z) const {
    CountedJob<cuda::GateSums> job(spec, in);
    job.p.G = int(in.k.size(1)), job.p.least = z.least, job.p.times_count = z.times_count;
    return counted_rows(job, in.denominator_gate);
  }
  at::Tensor by_row(const at::Tensor& x) const {  // [B, H, T]
    return plain(x.squeeze(-1).expand({in.q.size(0), in.q.size(1), in.q.size(2)}));
  }
};
at::Tensor divisor_on_gpu(const Spec& spec, const Inputs& in, const CountedKeys& counted) {
  return std::visit(DivisorOnGpu{spec, in, counted}, spec.denominator);
}

at::Tensor scale_on_gpu(const Spec& spec, const Inputs& in, const CountedKeys& counted) {
  if (!is<LogLength>(spec.sharpness) || in.keep.defined()) return scale(spec, in, counted.count());
  return by_count(spec, in, cuda::CountedRows::log_length, in.length_scale).unsqueeze(-1);
}

}  // namespace horner::attn::exec

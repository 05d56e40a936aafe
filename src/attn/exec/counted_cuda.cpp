#include "attn/exec/counted_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attn/exec/cpu.h"
#include "attn/exec/cuda_stream.h"
#include "attn/kernels/cuda/prepare/counts.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

// A problem of kernels/cuda/prepare/counts.h, without its pointers.
template <class Problem>
struct CountedJob : torch::CustomClassHolder {
  Problem p{};
  SeenKeys keys;

  CountedJob(const Spec& spec, const Inputs& in) : keys(seen_keys(spec.mask, in)) {
    p.B = int(in.q.size(0)), p.H = int(in.q.size(1));
    p.seen = keys.seen;
  }
  at::Tensor run(const at::Tensor& x) const {
    const auto floats = x.options().dtype(at::kFloat);
    const at::Tensor y = at::empty({p.B, p.H, p.seen.T}, floats);
    if (y.numel() > 0) kernel(p, x, memory<float>(y), nullptr, {});
    return y;
  }
  at::Tensor gradient(const at::Tensor& x, const at::Tensor& dy) const {
    if (dy.numel() == 0) return at::zeros_like(x);
    const at::Tensor dx = at::empty_like(x), given = plain(dy);
    kernel(p, x, nullptr, memory<float>(given), dx);
    return dx;
  }

  static void kernel(cuda::GateSums p, const at::Tensor& gates, float* y, const float* dy,
                     const at::Tensor& dx) {
    p.gates = typed(gates), p.d_gates = typed(dx), p.divisor = y, p.d_divisor = dy;
    const at::Tensor scratch =
        at::empty({p.B * p.G * cuda::gate_scratch(p)}, gates.options().dtype(at::kDouble));
    p.scratch = memory<double>(scratch);
    (y ? cuda::gate_divisor : cuda::gate_divisor_backward)(p, stream());
  }
  static void kernel(cuda::CountedRows p, const at::Tensor& learned, float* y, const float* dy,
                     const at::Tensor& dx) {
    p.learned = typed(learned), p.d_learned = typed(dx);
    p.value = y, p.d_value = dy;
    (y ? cuda::counted_rows : cuda::counted_rows_backward)(p, stream());
  }
};

template <class Problem>
struct Counted : torch::autograd::Function<Counted<Problem>> {
  using Job = CountedJob<Problem>;

  static at::Tensor forward(torch::autograd::AutogradContext* ctx, c10::intrusive_ptr<Job> job,
                            const at::Tensor& x) {
    ctx->save_for_backward({x});
    ctx->saved_data["job"] = c10::IValue::make_capsule(job);
    return job->run(x);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    check_first_order("the CUDA kernels");
    const at::Tensor x = ctx->get_saved_variables()[0];
    const c10::cuda::CUDAGuard guard(x.device());
    const auto job = c10::static_intrusive_pointer_cast<Job>(ctx->saved_data["job"].toCapsule());
    return {at::Tensor(), job->gradient(x, grads[0])};
  }
};
template <class Problem>
static at::Tensor apply(const c10::intrusive_ptr<CountedJob<Problem>>& job, const at::Tensor& x) {
  const at::Tensor given = gates(x);
  if (!given.requires_grad() || !at::GradMode::is_enabled()) return job->run(given);
  return Counted<Problem>::apply(job, given);
}

// The running sums of the gates, or with `backward` the gradient of the gates from that of the sums
// (double).
static at::Tensor decay_sums(const at::Tensor& x, at::ScalarType to, bool backward) {
  const c10::cuda::CUDAGuard guard(x.device());
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
struct DecayOnGpu : torch::autograd::Function<DecayOnGpu> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gates) {
    ctx->saved_data["dtype"] = int64_t(gates.scalar_type());
    return decay_sums(gates, at::kDouble, false);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    check_first_order("the CUDA kernels");
    return {
        decay_sums(grads[0].contiguous(), at::ScalarType(ctx->saved_data["dtype"].toInt()), true)};
  }
};
at::Tensor decay_on_gpu(const at::Tensor& gates) {
  if (!gates.defined()) return gates;
  const at::Tensor given = exec::gates(gates);
  if (!given.requires_grad() || !at::GradMode::is_enabled())
    return decay_sums(given, at::kDouble, false);
  return DecayOnGpu::apply(given);
}

static at::Tensor by_count(const Spec& spec, const Inputs& in, cuda::CountedRows::Kind kind,
                           const at::Tensor& learned) {
  const auto job = c10::make_intrusive<CountedJob<cuda::CountedRows>>(spec, in);
  job->p.kind = kind, job->p.scale = float(scale_factor(spec, in));
  return apply(job, learned);
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
    const auto job = c10::make_intrusive<CountedJob<cuda::GateSums>>(spec, in);
    job->p.G = int(in.k.size(1)), job->p.least = z.least, job->p.times_count = z.times_count;
    return apply(job, in.denominator_gate);
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

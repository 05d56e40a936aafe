// Sums of stick breaking by kernels (kernels/cuda/fused/stick.h); what follows them is tensor code.
#include "attn/exec/stick_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "attn/exec/autograd.h"
#include "attn/exec/counted_cuda.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/exec/exec.h"
#include "attn/exec/features_cuda.h"
#include "attn/kernels/cuda/fused/stick.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;

namespace {

struct StickJob {
  float scale, clamp, softcap;
  SeenKeys keys;
  int channels;
  at::Tensor statistics;  // [4, B, H, T] to write to, or undefined
  DropoutOnGpu dropout;
};
struct StickTensors {
  at::Tensor q, k, v;

  static auto fields(auto& x) { return std::array{&x.q, &x.k, &x.v}; }
};
struct StickResult {
  at::Tensor N, W, left;  // [B, H, T, E], [B, H, T], float32; [B, H, T], double

  static auto outputs(auto& r) { return std::array{&r.N, &r.W}; }
  static auto saved(auto& r) { return std::array{&r.left}; }
};

cuda::Sticks problem(const StickJob& job, const StickTensors& x) {
  FusedTensors of;
  of.q = x.q, of.k = x.k, of.v = x.v;
  cuda::Sticks p{};
  p.f = problem_of(of, cuda::Epilogue{}, job.channels);
  p.f.scale = job.scale, p.f.clamp = job.clamp, p.f.softcap = job.softcap;
  p.f.seen = job.keys.seen, p.f.lists = job.keys.lists, p.f.dropout = job.dropout.pairs;
  return p;
}

StickResult forward(const StickJob& job, const StickTensors& x, bool) {
  cuda::Sticks p = problem(job, x);
  const auto rows = x.q.options().dtype(at::kFloat);
  const StickResult r{at::empty({p.f.B, p.f.H, p.f.T, p.f.E}, rows),
                      at::empty({p.f.B, p.f.H, p.f.T}, rows),
                      at::empty({p.f.B, p.f.H, p.f.T}, rows.dtype(at::kDouble))};
  p.N = memory<float>(r.N), p.W = memory<float>(r.W), p.left = memory<double>(r.left);
  p.f.statistics = memory<float>(job.statistics);
  cuda::stick_forward(p, stream());
  return r;
}

StickTensors backward(const StickJob& job, const StickTensors& x, const StickResult& r,
                      const StickResult& grads) {
  cuda::Sticks p = problem(job, x);
  const auto rows = x.q.options().dtype(at::kFloat);
  const at::Tensor g = laid_out(grads.N.to(x.v.scalar_type())), dW = plain(grads.W);
  const at::Tensor dq = at::zeros({p.f.B, p.f.H, p.f.T, p.f.D}, rows);
  const at::Tensor swept = at::zeros({p.f.B, p.f.H, p.f.T, 2}, rows.dtype(at::kDouble));
  const at::Tensor states = at::zeros({p.f.B, p.f.H, p.f.T, cuda::kStickTiles, 2}, rows);
  const StickTensors d{{},
                       at::zeros({p.f.B, p.f.G, p.f.S, p.f.D}, x.k.options()),
                       at::zeros({p.f.B, p.f.G, p.f.S, p.f.E}, x.v.options())};
  p.f.d_o = view(g), p.f.dk = d.k.data_ptr(), p.f.dv = d.v.data_ptr();
  p.left = memory<double>(r.left), p.dW = memory<float>(dW), p.dq = memory<float>(dq);
  p.swept = memory<double>(swept), p.states = memory<float>(states);
  if (dW.numel() > 0) cuda::stick_backward(p, stream());
  return {dq.to(x.q.scalar_type()), d.k, d.v};
}

}  // namespace

std::string why_no_sticks(const Spec& spec) {
  const bool plain = !spec.centred && !spec.bias && is<NoDecay>(spec.decay) &&
                     sharpness_from(spec.sharpness) != SharpnessFrom::entropy;
  if (!plain)
    return "the CUDA kernels of stick breaking do not support centred scores, a bias, decay or an "
           "adaptive sharpness";
  return "";
}

at::Tensor attend_sticks_on_gpu(const Spec& spec, const Inputs& in, Statistics* statistics) {
  const c10::cuda::CUDAGuard guard(in.q.device());
  const CountedKeys counted(spec.mask, in);
  const double factor = scale_factor(spec, in);
  const bool by_row = sharpness_from(spec.sharpness) == SharpnessFrom::count;
  StickJob job{.scale = by_row || factor <= 0 ? 1 : float(factor),
               .clamp = float(spec.clamp),
               .softcap = float(spec.softcap),
               .keys = seen_keys(spec.mask, in),
               .channels = int(in.v.size(-1)),
               .statistics = statistics_memory(in, statistics),
               .dropout = dropout_on_gpu(spec, in)};
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  at::Tensor of_row, v = in.v;
  if (by_row) of_row = scale_on_gpu(spec, in, counted);
  at::Tensor q = mapped_on_gpu(spec.features, in.q, in.query_projection, 1, of_row);
  if (!by_row && factor <= 0) q = q * factor;
  if (const at::Tensor gate = value_gates(spec, in); gate.defined())
    v = (v * gate.unsqueeze(-1)).to(v.scalar_type());
  const StickTensors x{laid_out(q),
                       laid_out(mapped_on_gpu(spec.features, in.k, in.key_projection, repeats)),
                       laid_out(v)};
  const StickResult r = differentiable(kFusedCuda.name, job, x, forward, backward);
  const at::Tensor N = r.N.narrow(-1, 0, in.v.size(-1));
  return finish_on_gpu(spec, in, counted,
                       {N, r.W.unsqueeze(-1), at::zeros({1, 1, 1, 1}, r.W.options())});
}

}  // namespace horner::attn::exec

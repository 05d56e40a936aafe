// The sums of every row in one pass over tiles of keys, on the CPU: no T x S matrix, forward or
// backward. Features, gates and norms are tensor code around it.
#include "attn/exec/kernels/fused_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>

#include "attn/exec/exec.h"
#include "attn/exec/isa.h"
#include "attn/exec/stages.h"

namespace horner::attn::exec {

using kernels::Fused;

// Tasks one by one to whichever thread is free: they differ in length.
template <class F>
static void for_each_task(int64_t n, const F& f) {
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, std::min<int64_t>(n, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next++) < n;) f(i);
  });
}

// The keys that each query sees, as intervals.
struct Intervals {
  at::Tensor lo, hi;  // [T], int32

  Intervals(const Mask& mask, const Inputs& in) {
    const int64_t T = in.q.size(2), S = in.k.size(2);
    lo = at::empty({T}, at::kInt), hi = at::empty({T}, at::kInt);
    int32_t *l = lo.data_ptr<int32_t>(), *h = hi.data_ptr<int32_t>();
    for (int64_t t = 0; t < T; ++t) {
      const int64_t position = t + S - T;
      const auto* window = std::get_if<Window>(&mask);
      l[t] = window ? int32_t(std::max<int64_t>(0, position + 1 - window->size)) : 0;
      h[t] = int32_t(is<Full>(mask) ? S : std::max<int64_t>(0, position + 1));
    }
    if (!in.cu_seqlens.defined()) return;
    const at::Tensor cuts = in.cu_seqlens.to(at::kLong).contiguous();
    const int64_t* c = cuts.data_ptr<int64_t>();
    for (int64_t i = 0; i + 1 < cuts.numel(); ++i)
      for (int64_t t = c[i]; t < c[i + 1]; ++t) {
        l[t] = std::max<int32_t>(l[t], int32_t(c[i]));
        h[t] = std::min<int32_t>(h[t], int32_t(c[i + 1]));
      }
  }
  // Sums of x [..., S, C] over each query's keys, from running sums: [..., T, C].
  at::Tensor sums(const at::Tensor& x) const {
    const at::Tensor running = at::constant_pad_nd(x.to(at::kDouble).cumsum(-2), {0, 0, 1, 0});
    return running.index_select(-2, hi) - running.index_select(-2, at::minimum(lo, hi));
  }
};

// What the kernel needs beside the tensors that have gradients.
struct Job : torch::CustomClassHolder {
  kernels::Pointwise weight;
  float clamp;
  at::Tensor lo, hi, keep;
};

struct Pointwise {
  kernels::Pointwise operator()(Exp w) const { return w; }
  kernels::Pointwise operator()(Sigmoid w) const { return w; }
  kernels::Pointwise operator()(Taylor w) const { return polynomial(w); }
  kernels::Pointwise operator()(Power w) const { return polynomial(w); }
  template <class W>
  kernels::Pointwise operator()(W) const {
    return Exp{};
  }
};

static at::Tensor transposed(const at::Tensor& x) {  // [B, G, S, C] -> [B, G, blocks, C, kTile]
  const int64_t heads = x.size(0) * x.size(1), S = x.size(2), C = x.size(3), n = kernels::blocks(S);
  const at::Tensor tiles = at::empty({x.size(0), x.size(1), n, C, kernels::kTile}, x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = tiles.data_ptr<float>();
  const kernels::FusedKernels& k = *isa().fused;
  for_each_task(heads * n, [&](int64_t i) {
    k.transpose({from + i / n * S * C, to + i / n * n * C * kernels::kTile, S, C}, i % n);
  });
  return tiles;
}

template <class T>
static T* pointer(const at::Tensor& x) {
  return x.defined() ? x.data_ptr<T>() : nullptr;
}

static Fused problem(const Job& job, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& centre, const at::Tensor& decay) {
  Fused f{};
  f.B = q.size(0), f.H = q.size(1), f.G = k.size(1);
  f.T = q.size(2), f.S = k.size(2), f.D = q.size(3), f.E = v.size(3);
  f.weight = job.weight;
  f.clamp = job.clamp;
  f.q = pointer<float>(q), f.k = pointer<float>(k), f.v = pointer<float>(v);
  f.centre = pointer<float>(centre), f.decay = pointer<double>(decay);
  f.lo = pointer<int32_t>(job.lo), f.hi = pointer<int32_t>(job.hi);
  f.keep = reinterpret_cast<const uint8_t*>(pointer<bool>(job.keep));
  return f;
}

struct FusedSums : torch::autograd::Function<FusedSums> {
  // N, W and shift; the tensors are float32 (decay: double), contiguous, channels padded.
  static std::vector<at::Tensor> forward(torch::autograd::AutogradContext* ctx,
                                         const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const std::optional<at::Tensor>& centre,
                                         const std::optional<at::Tensor>& decay,
                                         c10::intrusive_ptr<Job> job) {
    const at::Tensor c = centre.value_or(at::Tensor()), g = decay.value_or(at::Tensor());
    Fused f = problem(*job, q, k, v, c, g);
    const at::Tensor k_tiles = transposed(k);
    const at::Tensor N = at::empty({f.B, f.H, f.T, f.E}, q.options());
    const at::Tensor W = at::empty({f.B, f.H, f.T, 1}, q.options()), shift = at::empty_like(W);
    f.k_tiles = pointer<float>(k_tiles);
    f.N = pointer<float>(N), f.W = pointer<float>(W), f.shift = pointer<float>(shift);
    const kernels::FusedKernels& kernel = *isa().fused;
    for_each_task(f.B * f.H * kernels::blocks(f.T), [&](int64_t i) { kernel.forward(f, i); });
    ctx->save_for_backward({q, k, v, c, g, k_tiles, shift});
    ctx->saved_data["job"] = c10::IValue::make_capsule(job);
    ctx->mark_non_differentiable({shift});
    return {N, W, shift};
  }

  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &c = saved[3], &g = saved[4];
    Fused f = problem(*c10::static_intrusive_pointer_cast<Job>(ctx->saved_data["job"].toCapsule()), q, k, v, c, g);
    const at::Tensor dN = grads[0].defined() ? grads[0].contiguous()
                                             : at::zeros({f.B, f.H, f.T, f.E}, q.options());
    const at::Tensor dW = grads[1].defined() ? grads[1].contiguous()
                                             : at::zeros({f.B, f.H, f.T, 1}, q.options());
    const at::Tensor v_tiles = transposed(v);
    // By the shape alone, so that the same bits come out whatever the number of threads.
    f.parts = std::clamp<int64_t>(16 / (f.B * f.G), 1, kernels::blocks(f.S));
    at::Tensor dq = at::zeros({f.parts, f.B, f.H, f.T, f.D}, q.options());
    const at::Tensor dk = at::zeros_like(k), dv = at::zeros_like(v);
    at::Tensor d_centre, d_query, d_decay;
    if (c.defined()) d_centre = at::zeros({f.parts, f.B, f.H, f.T}, q.options());
    if (g.defined()) {
      d_query = at::zeros({f.parts, f.B, f.H, f.T}, at::kDouble);
      d_decay = at::zeros({f.B, f.G, f.S}, at::kDouble);
    }
    f.k_tiles = pointer<float>(saved[5]), f.v_tiles = pointer<float>(v_tiles);
    f.shift = pointer<float>(saved[6]);
    f.dN = pointer<float>(dN), f.dW = pointer<float>(dW);
    f.dq = pointer<float>(dq), f.dk = pointer<float>(dk), f.dv = pointer<float>(dv);
    f.d_centre = pointer<float>(d_centre);
    f.d_decay_query = pointer<double>(d_query), f.d_decay_key = pointer<double>(d_decay);
    const kernels::FusedKernels& kernel = *isa().fused;
    for_each_task(f.B * f.G * f.parts, [&](int64_t i) { kernel.backward(f, i); });
    dq = f.parts == 1 ? dq.select(0, 0) : dq.sum(0);
    if (c.defined()) d_centre = d_centre.sum(0);
    if (g.defined()) {
      // A query's own gate sum is that of the key at its position.
      const at::Tensor per_key_head = d_query.sum(0).view({f.B, f.G, f.H / f.G, f.T}).sum(2);
      const int64_t n = std::min(f.T, f.S);
      d_decay.narrow(2, f.S - n, n) += per_key_head.narrow(2, f.T - n, n);
    }
    return {dq, dk, dv, d_centre, d_decay, at::Tensor()};
  }
};

static at::Tensor padded(const at::Tensor& x) {
  const int64_t rest = -x.size(-1) & (kernels::kPad - 1);
  const at::Tensor y = x.to(at::kFloat);
  return (rest ? at::constant_pad_nd(y, {0, rest}) : y).contiguous();
}

static at::Tensor run(const Spec& spec, const Inputs& in) {
  const Intervals seen(spec.mask, in);
  Sums sums;
  const at::Tensor ones = in.keep.defined() ? in.keep.view({in.q.size(0), 1, -1, 1}) : at::ones({1, 1, in.k.size(2), 1}, at::kBool);
  sums.count = seen.sums(ones).to(at::kFloat);
  const at::Tensor q0 = mapped(spec.features, in.q, in.query_projection).to(at::kFloat);
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  const at::Tensor k = mapped(spec.features, in.k, in.key_projection, repeats).to(at::kFloat);
  const at::Tensor factor = scale(spec, in, sums.count).to(at::kFloat);
  const at::Tensor q = q0 * factor;
  const at::Tensor v = spec.input_gate ? in.v * in.input_gate.unsqueeze(-1) : in.v;

  at::Tensor centre, decay;
  if (spec.centred) {  // the query times the mean key
    const at::Tensor mean = seen.sums(k * ones) / sums.count.clamp_min(1);
    centre = (q * mean.to(at::kFloat).repeat_interleave(repeats, 1)).sum(-1).contiguous();
  }
  if (in.decay.defined()) decay = in.decay.to(at::kDouble).cumsum(-1);
  auto job = c10::make_intrusive<Job>();
  job->weight = std::visit(Pointwise{}, spec.weight);
  job->clamp = spec.clamp;
  job->lo = seen.lo, job->hi = seen.hi;
  if (in.keep.defined()) job->keep = in.keep.contiguous();
  auto maybe = [](const at::Tensor& x) { return x.defined() ? std::optional(x) : std::nullopt; };
  const auto out = FusedSums::apply(padded(q), padded(k), padded(v), maybe(centre), maybe(decay), job);
  sums.N = out[0].narrow(-1, 0, v.size(-1));
  sums.W = out[1], sums.shift = out[2];
  if (is<CumulativeGate>(spec.denominator)) {
    const at::Tensor share = in.denominator_gate.exp().unsqueeze(-1) * ones;
    sums.gates = seen.sums(share).to(at::kFloat).repeat_interleave(repeats, 1);
  }
  return finish(spec, in, sums);
}

static std::string why_not(const Spec& spec, const Inputs& in) {
  if (!in.q.is_cpu()) return "the inputs are not on the CPU";
  const auto dtype = in.q.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16) return "float32 and bfloat16 only";
  if (is<Entmax>(spec.weight) || is<TopK>(spec.weight) || is<SelfAdjusted>(spec.weight))
    return "its weight needs the whole row";
  if (is<Adaptive>(spec.sharpness)) return "its temperature needs the whole row";
  if (in.q.size(-1) > kernels::kMostChannels || in.v.size(-1) > kernels::kMostChannels)
    return "head dimensions up to 256 only";
  return "";
}

const Execution fused_cpu{
    .name = "fused_cpu",
    .about = "one pass over tiles of keys, on the CPU",
    .why_not = why_not,
    .run = run,
};

}  // namespace horner::attn::exec

// One pass over tiles of keys, on an NVIDIA GPU: no T x S matrix, forward or backward. Features,
// the centre and divisors other than the sum are taken before it, by kernels of their own. Two rows
// of the table: kernels that run everything, and Hopper's.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cmath>

#include "attn/exec/centre_cuda.h"
#include "attn/exec/counted_cuda.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/exec/exec.h"
#include "attn/exec/features_cuda.h"
#include "attn/kernels/cuda/hopper/hopper.h"
#include "attn/plan.h"
#include "attn/stages.h"
#include "core/check.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;
using cuda::Fused;

// What the kernels need beside the tensors that have gradients.
struct CudaJob : torch::CustomClassHolder {
  bool hopper;                        // by its kernels
  bool own_q = false, own_k = false;  // q and k are of our making, and of no other's use
  cuda::Weights weights;
  float clamp, scale;
  SeenKeys keys;
  std::optional<CentreOf> centre;
  at::Tensor found;           // [B, H, T, 4], or undefined
  at::Tensor statistics;      // [4, B, H, T] to write to, or undefined
  cuda::Epilogue epilogue{};  // without its pointers
  int channels;               // of the result

  bool has_g() const { return epilogue.norm != cuda::Epilogue::none; }
};

// The tensors with gradients, in the order of CudaAttend's arguments; those behind q, k and v may
// be undefined.
struct CudaTensors {
  static constexpr size_t kCount = 11;
  at::Tensor q, k, v, centre, decay, gate, divisor, out_gate, post_gate, norm_weight, norm_bias;

  static CudaTensors from(const std::vector<at::Tensor>& x) {
    return {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10]};
  }
  std::vector<at::Tensor> list() const {
    return {q, k, v, centre, decay, gate, divisor, out_gate, post_gate, norm_weight, norm_bias};
  }
};

// What forward keeps for backward; u is undefined where it is o. W, shift and r: [3, B, H, T].
struct CudaResult {
  at::Tensor o, u, rows;

  void give(Fused& f) const {
    f.o = o.data_ptr(), f.u = memory<void>(u);
    if (!rows.defined()) return;
    const int64_t n = rows.numel() / 3;
    f.W = memory<float>(rows), f.shift = f.W + n, f.r = f.shift + n;
  }
};

static Fused problem(const CudaJob& job, const CudaTensors& x) {
  Fused f = problem_of(x, job.epilogue, job.channels);
  f.scale = job.scale, f.clamp = job.clamp;
  f.centre = memory<float>(x.centre), f.gate = memory<float>(x.gate);
  f.seen = job.keys.seen;
  f.epilogue.counted = f.seen;
  f.found = memory<cuda::Found>(job.found);
  return f;
}

// The copy engine takes no stride of 0.
static at::Tensor for_kernels(const CudaJob& job, const at::Tensor& given) {
  const at::Tensor x = laid_out(given);
  bool repeats = false;
  for (int64_t i = 0; i < x.dim(); ++i) repeats |= x.size(i) > 1 && x.stride(i) == 0;
  return job.hopper && repeats ? x.clone(at::MemoryFormat::Contiguous) : x;
}

static bool no_tokens(const Fused& f) {
  return f.B == 0 || f.T == 0;
}

// What Hopper's forward multiplies the weights of each key by, or undefined.
static at::Tensor hopper_factors(const Fused& f, const CudaTensors& x) {
  if (!f.decay) return {};
  const at::Tensor y = at::empty({f.B, f.G, cuda::factor_tiles(f), cuda::kFactorRow},
                                 x.q.options().dtype(at::kFloat));
  cuda::hopper_factors(f, memory<float>(y), stream());
  return y;
}

static CudaResult forward(const CudaJob& job, const CudaTensors& x, bool for_backward) {
  Fused f = problem(job, x);
  CudaResult r;
  r.o = at::empty({f.B, f.H, f.T, f.E}, x.q.options());
  if (for_backward && (x.norm_weight.defined() || x.post_gate.defined())) r.u = at::empty_like(r.o);
  if (for_backward || job.statistics.defined())
    r.rows = at::empty({3, f.B, f.H, f.T}, x.q.options().dtype(at::kFloat));
  r.give(f);
  f.statistics = memory<float>(job.statistics);
  if (std::holds_alternative<cuda::Other>(job.weights) && f.found)
    cuda::find(f, job.weights, /*adaptive=*/false, stream());
  // The copy engine takes no tensor without tokens.
  if (job.hopper && !no_tokens(f)) {
    const at::Tensor factors = hopper_factors(f, x);
    cuda::hopper_forward(f, job.weights, memory<float>(factors), stream());
  } else {
    cuda::forward(f, job.weights, stream());
  }
  if (f.statistics) cuda::statistics(f, job.weights, stream());
  return r;
}

// Where dq is summed: by `rows` its memory is cleared, by `sum_products` it is used.
static at::Tensor dq_sums(const CudaJob& job, const CudaTensors& x, Fused& f) {
  if (at::globalContext().deterministicAlgorithms()) return {};
  f.dq_rows = cuda::sums_in_tiles(f) ? cuda::kDqTile : 1;
  f.dq_row = job.hopper ? cuda::hopper_channels(f) : f.D;
  const int64_t rows = (f.T + f.dq_rows - 1) / f.dq_rows * f.dq_rows;
  return at::empty({f.B, f.H, rows, f.dq_row}, x.q.options().dtype(at::kFloat));
}

// Whether no two blocks of the kernel for dk and dv read the same keys.
static bool has_own_keys(const CudaJob& job, const Fused& f) {
  return job.hopper || std::max(f.D, f.E) <= 128;
}

// dk, dv and dq. Where the graph does not run again, dq of atomic sums lies in the memory of q,
// which has then been read, and dk in that of k where a block reads no keys but those whose
// gradient it writes at its end. Otherwise dq lies in g, where that has its shape.
static void sum_products(const CudaJob& job, const CudaTensors& x, const at::Tensor& g,
                         const at::Tensor& dq_sum, Fused& f, CudaTensors& d) {
  const bool centred = job.centre && f.S > 0;
  const bool last = dq_sum.defined() && !torch::autograd::get_current_graph_task_keep_graph();
  const bool over_q = last && job.own_q && x.q.is_contiguous();
  const bool over_k = last && job.own_k && x.k.is_contiguous() && has_own_keys(job, f);
  d.k = over_k ? x.k.detach() : at::empty({f.B, f.G, f.S, f.D}, x.k.options());
  d.v = at::empty({f.B, f.G, f.S, f.E}, x.v.options());
  const bool is_dq = dq_sum.defined() && f.dtype == cuda::Dtype::float32;
  d.q = is_dq                       ? dq_sum
        : over_q                    ? x.q.detach()
        : g.defined() && f.D == f.E ? g.detach()
                                    : at::empty({f.B, f.H, f.T, f.D}, x.q.options());
  f.dk = d.k.data_ptr(), f.dv = d.v.data_ptr(), f.dq = d.q.data_ptr();
  (job.hopper ? cuda::hopper_keys : cuda::keys)(f, job.weights, stream());
  const bool of_sums = dq_sum.defined() && !cuda::sums_in_tiles(f) && !is_dq;
  if (!dq_sum.defined())  // no atomic additions: two products more
    cuda::queries(f, job.weights, stream());
  else if (cuda::sums_in_tiles(f))
    cuda::dq_of_sums(f, stream());
  else if (of_sums && !centred)
    d.q.copy_(dq_sum);
  if (centred)
    add_centre_gradients(*job.centre, x.q, x.k, d.centre, of_sums ? dq_sum : at::Tensor(), d.q,
                         d.k);
}

static CudaTensors zeros(const CudaTensors& x) {
  std::vector<at::Tensor> d = x.list();
  for (at::Tensor& y : d)
    if (y.defined()) y = at::zeros_like(y, at::MemoryFormat::Contiguous);
  return CudaTensors::from(d);
}

static CudaTensors backward(const CudaJob& job, const CudaTensors& x, const CudaResult& r,
                            const at::Tensor& given) {
  Fused f = problem(job, x);
  if (no_tokens(f)) return zeros(x);
  const at::Tensor grad = for_kernels(job, given);
  const auto rows = r.rows.options();
  const at::Tensor queries = at::empty({f.B, f.H, f.T, 4}, rows), dq_sum = dq_sums(job, x, f);
  at::Tensor g, pulls, d_query, norm_parts;
  CudaTensors d = epilogue_gradients(x, f, norm_parts);
  // Each row of u is read before that of g is written; unless this graph is to run again, one
  // memory is enough for both.
  if (!torch::autograd::get_current_graph_task_keep_graph()) g = r.u;
  if (job.has_g() && !g.defined()) g = at::empty_like(r.o);
  if (job.found.defined()) pulls = at::empty({f.B, f.H, f.T, 4}, rows);
  if (x.centre.defined()) d.centre = at::zeros_like(x.centre);
  if (x.gate.defined()) d.gate = at::zeros_like(x.gate);
  if (x.decay.defined()) {
    d_query = at::empty({f.B, f.H, f.T}, x.decay.options());
    if (f.dtype == cuda::Dtype::float32) d_query.zero_();  // d_decay_rows
    d.decay = at::empty_like(x.decay);
  }
  r.give(f);
  f.d_o = view(grad), f.g = job.has_g() ? g.data_ptr() : nullptr, f.dq_sum = memory<float>(dq_sum);
  f.queries = memory<cuda::Query>(queries), f.pulls = memory<cuda::Pull>(pulls);
  f.d_centre = memory<float>(d.centre), f.d_gate = memory<float>(d.gate);
  f.d_decay_query = memory<double>(d_query), f.d_decay_key = memory<double>(d.decay);
  if (f.dtype == cuda::Dtype::float32) f.d_decay_rows = f.d_decay_query;
  cuda::rows(f, job.weights, stream());
  if (f.pulls) cuda::pulls(f, job.weights, stream());
  sum_products(job, x, g, dq_sum, f, d);
  // A query's own gate sum is that of the key at its position; Hopper's keys have added it.
  if (x.decay.defined() && !job.hopper) {
    const at::Tensor per_key_head = d_query.view({f.B, f.G, f.H / f.G, f.T}).sum(2);
    const int64_t n = std::min(f.T, f.S);
    d.decay.narrow(2, f.S - n, n) += per_key_head.narrow(2, f.T - n, n);
  }
  return d;
}

struct CudaAttend : torch::autograd::Function<CudaAttend> {
  // q, k, v of one dtype, laid out for the kernels; decay in double, gates of rows as they are, the
  // rest in float32.
  template <class... Optional>
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, c10::intrusive_ptr<CudaJob> job,
                            const Optional&... given) {
    const CudaTensors x = CudaTensors::from({given.value_or(at::Tensor())...});
    const CudaResult r = exec::forward(*job, x, true);
    std::vector<at::Tensor> saved = x.list();
    for (const at::Tensor& y : {r.o, r.u, r.rows}) saved.push_back(y);
    ctx->save_for_backward(saved);
    ctx->saved_data["job"] = c10::IValue::make_capsule(job);
    return r.o;
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    check(!c10::GradMode::is_enabled(),
          "gradients of gradients: only 'reference' has them, not 'fused_cuda' and 'hopper_cuda'");
    const auto saved = ctx->get_saved_variables();
    const c10::cuda::CUDAGuard guard(saved[0].device());
    const auto job =
        c10::static_intrusive_pointer_cast<CudaJob>(ctx->saved_data["job"].toCapsule());
    const auto* kept = &saved[CudaTensors::kCount];
    const CudaResult r{kept[0], kept[1], kept[2]};
    auto out = exec::backward(*job, CudaTensors::from(saved), r, grads[0]).list();
    out.insert(out.begin(), at::Tensor());  // the job
    return out;
  }
};

static at::Tensor differentiable(const c10::intrusive_ptr<CudaJob>& job, const CudaTensors& x) {
  bool gradients = false;
  for (const at::Tensor& y : x.list()) gradients |= y.defined() && y.requires_grad();
  if (!gradients || !at::GradMode::is_enabled()) return forward(*job, x, false).o;
  auto maybe = [](const at::Tensor& y) { return y.defined() ? std::optional(y) : std::nullopt; };
  return CudaAttend::apply(job, maybe(x.q), maybe(x.k), maybe(x.v), maybe(x.centre), maybe(x.decay),
                           maybe(x.gate), maybe(x.divisor), maybe(x.out_gate), maybe(x.post_gate),
                           maybe(x.norm_weight), maybe(x.norm_bias));
}

// What multiplies the queries' scores, [B, H, T, 1], from the entropy of their softmax.
static at::Tensor sharpness(const CudaJob& job, const at::Tensor& q, const at::Tensor& k) {
  const at::NoGradGuard constant;
  Fused f = problem(job, {.q = q, .k = k, .v = k});
  f.clamp = kNoClamp;
  const at::Tensor found = at::empty({f.B, f.H, f.T, 4}, q.options().dtype(at::kFloat));
  f.found = memory<cuda::Found>(found);
  cuda::find(f, job.weights, /*adaptive=*/true, stream());
  return found.narrow(-1, 3, 1);
}

static c10::intrusive_ptr<CudaJob> job_for(const Spec& spec, const Inputs& in,
                                           Statistics* statistics) {
  auto job = c10::make_intrusive<CudaJob>();
  job->weights = cuda_weights(spec.weight);
  job->clamp = spec.clamp, job->channels = int(in.v.size(-1));
  job->keys = seen_keys(spec.mask, in);
  job->epilogue = cuda_epilogue(spec, in);
  const auto rows = in.q.options().dtype(at::kFloat);
  if (!facts(spec.weight).of_one_score)
    job->found = at::empty({in.q.size(0), in.q.size(1), in.q.size(2), 4}, rows);
  if (statistics) {
    const at::Tensor all = at::empty({4, in.q.size(0), in.q.size(1), in.q.size(2)}, rows);
    *statistics = {all.select(0, 0), all.select(0, 1), all.select(0, 2), all.select(0, 3)};
    job->statistics = all;
  }
  return job;
}

// float16 keeps too few bits for queries times a scale of their own, and for the gradient of a norm
// whose row can vanish.
static bool needs_float32(const Spec& spec) {
  return sharpness_from(spec.sharpness) == SharpnessFrom::count ||
         (may_be_negative(spec) && !is<NoNorm>(spec.norm));
}

template <bool hopper>
static at::Tensor run(const Spec& spec, const Inputs& in, Statistics* statistics) {
  if (in.q.scalar_type() == at::kHalf && needs_float32(spec)) {
    Inputs wide = in;
    for (at::Tensor* x : {&wide.q, &wide.k, &wide.v}) *x = x->to(at::kFloat);
    return run<false>(spec, wide, statistics).to(at::kHalf);
  }
  const c10::cuda::CUDAGuard guard(in.q.device());
  const CountedKeys counted(spec.mask, in);
  const auto job = job_for(spec, in, statistics);
  job->hopper = hopper;
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  CudaTensors x;
  // The kernels want a scale above 0; any other goes into q.
  const double factor = scale_factor(spec, in);
  const SharpnessFrom from = sharpness_from(spec.sharpness);
  const bool by_row = from == SharpnessFrom::count;
  job->scale = by_row || factor <= 0 ? 1 : float(factor);
  at::Tensor of_row;
  if (by_row) of_row = scale_on_gpu(spec, in, counted);
  const at::Tensor k = mapped_on_gpu(spec.features, in.k, in.key_projection, repeats);
  // After k, so that its backward comes first: when dq has just been written.
  at::Tensor q = mapped_on_gpu(spec.features, in.q, in.query_projection, 1, of_row);
  if (!by_row && factor <= 0) q = q * factor;
  x.q = for_kernels(*job, q), x.k = for_kernels(*job, k);
  x.v = for_kernels(*job, in.v);
  if (spec.input_gate) x.gate = plain(in.input_gate);
  if (from == SharpnessFrom::entropy) {
    q = mapped_on_gpu(Identity{}, q, {}, 1, sharpness(*job, x.q.detach(), x.k.detach()));
    x.q = for_kernels(*job, q);
  }
  if (spec.centred) {  // the query times the mean key
    CentreOf of{job->keys, {}, job->scale};
    if (in.keep.defined()) of.count = counted.count().view({in.q.size(0), -1}).contiguous();
    x.centre = centre(of, x.q.detach(), x.k.detach());
    job->centre = of;
  }
  // The centre needs both behind the kernels.
  job->own_q = !spec.centred && !x.q.is_alias_of(in.q);
  job->own_k = !spec.centred && !x.k.is_alias_of(in.k);
  x.decay = decay_on_gpu(log_gates(spec.decay, in));
  x.divisor = divisor_on_gpu(spec, in, counted);
  x.out_gate = gates(in.output_gate), x.post_gate = gates(in.post_gate);
  x.norm_weight = plain(in.norm_weight), x.norm_bias = plain(in.norm_bias);
  const at::Tensor o = differentiable(job, x);
  return o.size(-1) == in.v.size(-1) ? o : o.narrow(-1, 0, in.v.size(-1));
}

static std::string why_not(const Spec& spec, const Inputs& in) {
  if (!in.q.is_cuda()) return "the inputs are not on an NVIDIA GPU";
  if (const std::string reason = why_not_on_cuda(spec); !reason.empty()) return reason;
  if (cuda::compute_capability(in.q.device().index()) < 80)
    return "a GPU of compute capability 8.0 or above is wanted";
  if (in.q.scalar_type() == at::kDouble) return "bfloat16, float16 and float32 only";
  const int64_t channels = std::max(in.q.size(-1), in.v.size(-1));
  if (channels > cuda::kMostChannels) return "head dimensions up to 256 only";
  const int wanted = cuda::shared_memory_wanted(dtype_of(in.q), int(channels));
  const int there = cuda::shared_memory(in.q.device().index());
  if (wanted > there)
    return "this head dimension wants " + std::to_string(wanted / 1024) +
           " KB of shared memory, this GPU has " + std::to_string(there / 1024);
  return "";
}

static std::string why_not_hopper(const Spec& spec, const Inputs& in) {
  if (const std::string reason = why_not(spec, in); !reason.empty()) return reason;
  if (const std::string reason = cuda::hopper_why_not(in.q.device().index()); !reason.empty())
    return reason;
  const auto dtype = in.q.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return "bfloat16 and float16 only";
  if (dtype == at::kHalf && needs_float32(spec)) return "in float16 this variant runs in float32";
  if (std::holds_alternative<cuda::Other>(cuda_weights(spec.weight)))
    return "exponentials and polynomials only";
  const bool decays = log_gates(spec.decay, in).defined();
  if (decays && cuda_epilogue(spec, in).by_sum)
    return "no decay with a sum as denominator";
  if (spec.centred && decays) return "no centred scores with decay";
  if (std::max(mapped_channels(spec, in.q.size(-1)), in.v.size(-1)) > cuda::kMostHopperChannels)
    return "head dimensions up to 128 only";
  return "";
}

static double work(const Spec& spec, const Inputs& in) {
  return double(in.q.size(0) * in.q.size(1)) *
         work_in_tiles(spec, in.q.size(2), in.k.size(2), in.q.size(-1), in.v.size(-1));
}

const Execution fused_cuda{
    .name = "fused_cuda",
    .about = "one pass over tiles of keys, on an NVIDIA GPU (tensor cores, from sm_80 on)",
    .why_not = why_not,
    .run = run<false>,
    .work = work,
};
const Execution hopper_cuda{
    .name = "hopper_cuda",
    .about = "the same on an NVIDIA GPU of compute capability 9.0 (wgmma, the copy engine)",
    .why_not = why_not_hopper,
    .run = run<true>,
    .work = work,
};

}  // namespace horner::attn::exec

// One pass over tiles of keys, on an NVIDIA GPU: no T x S matrix, forward or backward. Kernels of
// their own compute the features, the centre and divisors other than the sum before it. hopper_cuda
// runs the same steps with its own kernels.
#include "attn/exec/fused_cuda.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAGuard.h>

#include "attn/exec/autograd.h"
#include "attn/exec/centre_cuda.h"
#include "attn/exec/counted_cuda.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/exec/delta.h"
#include "attn/exec/exec.h"
#include "attn/exec/features_cuda.h"
#include "attn/exec/gradients_cuda.h"
#include "attn/exec/near_cuda.h"
#include "attn/exec/stick_cuda.h"
#include "attn/kernels/cuda/fused/fused.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;
using cuda::Fused;

// What the kernels need besides the differentiable tensors.
struct CudaJob {
  const TileKernels* kernels;
  bool own_q = false, own_k = false;  // only this execution uses the memory of q and k
  cuda::Weights weights;
  float clamp, scale, softcap;
  SeenKeys keys;
  DropoutOnGpu dropout;
  std::optional<CentreOf> centre;
  at::Tensor thresholds;      // [B, H, T, 4], or undefined
  at::Tensor statistics;      // [4, B, H, T] to write to, or undefined
  at::Tensor log_sum;         // [B, H, T], likewise
  bool gated;                 // the decay is of gates
  cuda::Epilogue epilogue{};  // without its pointers
  int channels;               // of the result

  // Whether the score gradients of a row share sums.
  bool shares_gradients() const {
    return thresholds.defined() && std::holds_alternative<cuda::RuntimeWeight>(weights) &&
           !is_softpick();
  }
  bool is_softpick() const {
    const auto* w = std::get_if<cuda::RuntimeWeight>(&weights);
    return w && w->kind == cuda::RuntimeWeight::softpick;
  }
  bool has_g() const { return epilogue.norm != cuda::Epilogue::none; }
  // Whether backward subtracts from the gradient its part along the row.
  bool projects() const { return has_g() || (epilogue.by_sum && !epilogue.detach); }
  // Whether it does so with more bits of the row than its dtype has. In bfloat16 only where a row
  // may be no mean of values: dropout scales what is left, and softpick's sum can be near 0.
  bool keeps_rest(cuda::Dtype dtype) const {
    const bool wide = dropout.pairs.seed || is_softpick();
    return projects() &&
           (dtype == cuda::Dtype::float16 || (dtype == cuda::Dtype::bfloat16 && wide));
  }
};

// u is undefined where it equals o. rest: what rounding took from it, where it is kept. rows: W,
// shift, r and the mean of a LayerNorm, [3 or 4, B, H, T]. decay: the running sums.
struct CudaResult {
  at::Tensor o, u, rest, rows, decay;

  static auto outputs(auto& r) { return std::array{&r.o}; }
  static auto saved(auto& r) { return std::array{&r.o, &r.u, &r.rest, &r.rows, &r.decay}; }

  void give(Fused& f) const {
    f.o = o.data_ptr(), f.u = memory<void>(u), f.rest = memory<void>(rest);
    f.decay = memory<double>(decay);
    if (!rows.defined()) return;
    const int64_t n = rows.numel() / rows.size(0);
    f.W = memory<float>(rows), f.shift = f.W + n, f.r = f.shift + n;
    f.mean = rows.size(0) > 3 ? f.r + n : nullptr;
  }
};

// The strides of the batch and the heads of a contiguous tensor, 0 where all share one.
static std::pair<int64_t, int64_t> shared_strides(const at::Tensor& x) {
  return {x.size(0) > 1 ? x.stride(0) : 0, x.size(1) > 1 ? x.stride(1) : 0};
}

// q, k, v in one dtype, laid out for the kernels; decay, output and post gates in any dtype, the
// rest in float32.
static Fused problem(const CudaJob& job, const FusedTensors& x) {
  Fused f = problem_of(x, job.epilogue, job.channels);
  f.scale = job.scale, f.clamp = job.clamp, f.softcap = job.softcap;
  f.bias = memory<float>(x.bias);
  if (f.bias) std::tie(f.bias_batch, f.bias_head) = shared_strides(x.bias);
  f.centre = memory<float>(x.centre), f.gate = memory<float>(x.gate);
  f.decay_in_scores = x.decay.defined() && std::holds_alternative<Exp>(job.weights);
  f.epilogue.sink = memory<float>(x.sink);
  f.seen = job.keys.seen;
  f.epilogue.counted = f.seen;
  f.thresholds = memory<cuda::RowThreshold>(job.thresholds);
  f.lists = job.keys.lists, f.dropout = job.dropout.pairs;
  return f;
}

// From u, W and r that are NaN, backward makes gradients that are. From a shift it would not: a
// score that is not below the clamp has none.
static void spoil(const CudaJob& job, const FusedTensors& x, const CudaResult& r) {
  std::vector<at::Tensor> rows{r.o, r.u};
  if (r.rows.defined()) rows.insert(rows.end(), {r.rows[0], r.rows[2]});
  if (job.statistics.defined())
    for (const at::Tensor& plane : job.statistics.unbind(0)) rows.push_back(plane);
  spoil_rows(x.decay, job.keys.seen, job.keys.lists, rows);
}

static CudaResult allocated(const CudaJob& job, const FusedTensors& x, const Fused& f,
                            bool for_backward) {
  CudaResult r;
  r.o = at::empty({f.B, f.H, f.T, f.E}, x.q.options());
  if (for_backward && (x.norm_weight.defined() || x.post_gate.defined())) r.u = at::empty_like(r.o);
  if (for_backward && job.keeps_rest(f.dtype)) r.rest = at::empty_like(r.o);
  const bool keeps_mean = f.epilogue.norm == cuda::Epilogue::layer &&
                          (f.dtype != cuda::Dtype::bfloat16 || r.rest.defined());
  if (for_backward || job.statistics.defined() || job.log_sum.defined())
    r.rows = at::empty({keeps_mean ? 4 : 3, f.B, f.H, f.T}, x.q.options().dtype(at::kFloat));
  return r;
}

// The same shapes as those of forward().
static CudaResult unwritten(const CudaJob& job, const FusedTensors& x) {
  CudaResult r = allocated(job, x, problem(job, x), true);
  if (x.decay.defined()) r.decay = at::empty(x.decay.sizes(), x.decay.options().dtype(at::kDouble));
  return r;
}

static CudaResult forward(const CudaJob& job, const FusedTensors& x, bool for_backward) {
  Fused f = problem(job, x);
  CudaResult r = allocated(job, x, f, for_backward);
  r.decay = decay_sums(x.decay, job.gated);
  r.give(f);
  f.statistics = memory<float>(job.statistics);
  if (std::holds_alternative<cuda::RuntimeWeight>(job.weights) && f.thresholds)
    cuda::find_row_thresholds(f, job.weights, /*adaptive=*/false, stream());
  job.kernels->forward(f, job.weights, stream());
  if (f.statistics) cuda::fused_statistics(f, job.weights, stream());
  if (job.gated) spoil(job, x, r);
  if (job.log_sum.defined()) job.log_sum.copy_(r.rows[0]).log_().add_(r.rows[1]);
  return r;
}

// dk, dv and dq. Where the graph does not run again, dq of atomic sums reuses the memory of q,
// which has then been read, and dk that of k where a thread block reads only the keys whose
// gradient it writes at its end. Otherwise dq reuses g where the shapes are equal.
static void sum_products(const CudaJob& job, const FusedTensors& x, const at::Tensor& g,
                         const at::Tensor& dq_sum, Fused& f, FusedTensors& d) {
  const bool centred = job.centre && f.S > 0;
  const bool last = dq_sum.defined() && !keeps_graph();
  const bool over_q = last && job.own_q && x.q.is_contiguous();
  const bool over_k = last && job.own_k && x.k.is_contiguous() && job.kernels->owns_keys(f);
  d.k = over_k ? x.k.detach() : at::empty({f.B, f.G, f.S, f.D}, x.k.options());
  d.v = at::empty({f.B, f.G, f.S, f.E}, x.v.options());
  const bool is_dq = dq_sum.defined() && f.dtype == cuda::Dtype::float32;
  d.q = is_dq                       ? dq_sum
        : over_q                    ? x.q.detach()
        : g.defined() && f.D == f.E ? g.detach()
                                    : at::empty({f.B, f.H, f.T, f.D}, x.q.options());
  f.dk = d.k.data_ptr(), f.dv = d.v.data_ptr(), f.dq = d.q.data_ptr();
  job.kernels->keys(f, job.weights, stream());
  const bool of_sums = dq_sum.defined() && !cuda::dq_in_fragments(f) && !is_dq;
  if (!dq_sum.defined())  // no atomic additions: two more products
    cuda::fused_dq(f, job.weights, stream());
  else if (cuda::dq_in_fragments(f))
    cuda::unpack_dq(f, stream());
  else if (of_sums && !centred)
    d.q.copy_(dq_sum);
  if (centred)
    add_centre_gradients(*job.centre, x.q, x.k, d.centre, of_sums ? dq_sum : at::Tensor(), d.q,
                         d.k);
}

// Where the gradient of a bias is added up: where algorithms must be deterministic, no two rows of
// scores share a row of it.
static at::Tensor bias_sums(const at::Tensor& bias, Fused& f) {
  const bool apart = at::globalContext().deterministicAlgorithms();
  const at::Tensor d = apart ? at::zeros({f.B, f.H, f.T, f.S}, bias.options())
                             : at::zeros_like(bias, at::MemoryFormat::Contiguous);
  f.d_bias = memory<float>(d);
  std::tie(f.d_bias_batch, f.d_bias_head) = shared_strides(d);
  return d;
}

static FusedTensors zeros_like(const FusedTensors& x) {
  FusedTensors d = x;
  for (at::Tensor* y : FusedTensors::fields(d))
    if (y->defined()) *y = at::zeros_like(*y, at::MemoryFormat::Contiguous);
  return d;
}

static FusedTensors backward(const CudaJob& job, const FusedTensors& x, const CudaResult& r,
                             const CudaResult& grads) {
  Fused f = problem(job, x);
  if (f.B == 0 || f.T == 0) return zeros_like(x);
  const at::Tensor grad = job.kernels->laid_out(grads.o);
  const auto rows = r.rows.options();
  const at::Tensor queries = at::empty({f.B, f.H, f.T, 4}, rows);
  // `row_gradients` clears it, `sum_products` uses it.
  const at::Tensor dq_sum = dq_sums(f, x.q, job.kernels->dq_channels(f));
  at::Tensor g, gradient_sums, norm_parts;
  FusedTensors d = epilogue_gradients(x, f, norm_parts);
  // Each row of u is read before that of g is written: g reuses its memory unless this graph runs
  // again.
  if (!keeps_graph()) g = r.u;
  if (job.has_g() && !g.defined()) g = at::empty_like(r.o);
  if (job.shares_gradients()) gradient_sums = at::empty({f.B, f.H, f.T, 4}, rows);
  if (job.centre || (x.centre.defined() && x.centre.requires_grad()))
    d.centre = at::zeros_like(x.centre);  // else a constant
  if (x.gate.defined()) d.gate = at::zeros_like(x.gate);
  if (x.sink.defined()) d.sink = at::empty_like(x.sink);
  if (x.bias.defined() && x.bias.requires_grad()) d.bias = bias_sums(x.bias, f);
  const DecayGradient d_decay(f, x.decay);
  r.give(f);
  f.epilogue.d_sink = memory<float>(d.sink);
  f.d_o = view(grad), f.g = job.has_g() ? g.data_ptr() : nullptr, f.dq_sum = memory<float>(dq_sum);
  f.queries = memory<cuda::Query>(queries),
  f.gradient_sums = memory<cuda::RowGradientSums>(gradient_sums);
  f.d_centre = memory<float>(d.centre), f.d_gate = memory<float>(d.gate);
  cuda::row_gradients(f, job.weights, stream());
  if (f.gradient_sums) cuda::row_gradient_sums(f, job.weights, stream());
  sum_products(job, x, g, dq_sum, f, d);
  if (d.bias.defined()) d.bias = at::sum_to(d.bias, x.bias.sizes());
  d.decay = d_decay.of_gates(x.decay);
  return d;
}

// What multiplies the queries' scores, [B, H, T, 1], from the entropy of their softmax.
static at::Tensor sharpness(const CudaJob& job, const at::Tensor& q, const at::Tensor& k) {
  const at::NoGradGuard constant;
  Fused f = problem(job, {.q = q, .k = k, .v = k});
  f.clamp = kNoClamp, f.softcap = 0;
  const at::Tensor thresholds = at::empty({f.B, f.H, f.T, 4}, q.options().dtype(at::kFloat));
  f.thresholds = memory<cuda::RowThreshold>(thresholds);
  cuda::find_row_thresholds(f, job.weights, /*adaptive=*/true, stream());
  return thresholds.narrow(-1, 3, 1);
}

static CudaJob job_for(const TileKernels& kernels, const Spec& spec, const Inputs& in,
                       Statistics* statistics) {
  CudaJob job;
  job.kernels = &kernels;
  job.weights = cuda_weights(spec.weight);
  job.clamp = float(spec.clamp), job.softcap = float(spec.softcap);
  job.channels = int(in.v.size(-1));
  job.keys = seen_keys(spec.mask, in);
  job.epilogue = cuda_epilogue(spec, in);
  job.dropout = dropout_on_gpu(spec, in);
  job.gated = is<TokenGate>(spec.decay);
  if (!facts(spec.weight).of_one_score)
    job.thresholds =
        at::empty({in.q.size(0), in.q.size(1), in.q.size(2), 4}, in.q.options().dtype(at::kFloat));
  job.statistics = statistics_memory(in, statistics);
  if (statistics && statistics->only_log_sum)
    job.log_sum = statistics->log_sum = log_sum_memory(in);
  return job;
}

// The query times the mean key, [B, H, T], for lists of keys: in tensor code.
static at::Tensor listed_centre(const Spec& spec, const Inputs& in, const CountedKeys& counted,
                                const at::Tensor& q, const at::Tensor& k) {
  at::Tensor kept = k;
  if (in.keep.defined()) kept = k.masked_fill(in.keep.logical_not().unsqueeze(1).unsqueeze(3), 0);
  const at::Tensor mean = sums_over_keys(keys_seen(spec.mask, in), kept) / counted.count();
  return plain((q * mean.repeat_interleave(q.size(1) / k.size(1), 1)).sum(-1));
}

// Dropout: where the largest weight of a row is left out, the others may be too small for float16.
bool needs_float32(const Spec& spec) {
  return sharpness_from(spec.sharpness) == SharpnessFrom::count || !is<NoKeys>(spec.near) ||
         is<StickBreaking>(spec.weight) || is<Softpick>(spec.weight) || is<Delta>(spec.values) ||
         spec.dropout != 0 || (may_be_negative(spec) && !is<NoNorm>(spec.norm));
}

at::Tensor attend_in_tiles(const TileKernels& kernels, const Spec& given, const Inputs& inputs,
                           Statistics* statistics) {
  const WithoutChannelGates rest(given, inputs);
  const Spec& spec = rest.spec;
  const Inputs& in = rest.in;
  const c10::cuda::CUDAGuard guard(in.q.device());
  const CountedKeys counted(spec.mask, in);
  CudaJob job = job_for(kernels, spec, in, statistics);
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  FusedTensors x;
  const SharpnessFrom from = sharpness_from(spec.sharpness);
  const bool by_row = from == SharpnessFrom::count;
  at::Tensor of_row;
  if (by_row) of_row = scale_on_gpu(spec, in, counted);
  const at::Tensor k = mapped_on_gpu(spec.features, in.k, in.key_projection, repeats);
  // After k, so that its backward comes first: dq has just been written, and is in the cache.
  at::Tensor q = mapped_on_gpu(spec.features, in.q, in.query_projection, 1, of_row);
  q = scaled(q, by_row ? 1 : scale_factor(spec, in), job.scale);
  x.q = kernels.laid_out(q), x.k = kernels.laid_out(k);
  x.v = kernels.laid_out(in.v);
  x.gate = plain(value_gates(spec, in));
  if (from == SharpnessFrom::entropy) {
    q = mapped_on_gpu(Identity{}, q, {}, 1, sharpness(job, x.q.detach(), x.k.detach()));
    x.q = kernels.laid_out(q);
  }
  if (spec.centred && is_listed(spec.mask, in)) {
    x.centre = listed_centre(spec, in, counted, x.q, x.k) * job.scale;
  } else if (spec.centred) {  // the query times the mean key
    CentreOf of{job.keys, {}, job.scale};
    if (in.keep.defined()) of.count = counted.count().flatten(1).contiguous();
    x.centre = centre(of, x.q.detach(), x.k.detach());
    job.centre = of;
  }
  if (spec.less_log_count) {
    const at::Tensor log = log_count_on_gpu(spec, in, counted);
    x.centre = x.centre.defined() ? x.centre + log : log;
  }
  // The centre reads both after the kernels.
  job.own_q = !spec.centred && !x.q.is_alias_of(in.q);
  job.own_k = !spec.centred && !x.k.is_alias_of(in.k);
  x.decay = gates(log_gates(spec.decay, in));
  x.divisor = divisor_on_gpu(spec, in, counted);
  x.sink = sink_of_rows(in);
  x.bias = plain(in.bias);
  x.out_gate = gates(in.output_gate), x.post_gate = gates(in.post_gate);
  x.norm_weight = plain(in.norm_weight), x.norm_bias = plain(in.norm_bias);
  // Row thresholds are an input of backward that forward writes.
  const auto allocate = job.thresholds.defined() ? nullptr : unwritten;
  const at::Tensor o =
      differentiable(kernels.execution, job, x, forward, backward, false, allocate).o;
  return rest.finish(o.size(-1) == in.v.size(-1) ? o : o.narrow(-1, 0, in.v.size(-1)));
}

std::string why_not_in_tiles(const Spec& spec, const Inputs& in) {
  if (!in.q.is_cuda()) return "the inputs are not on an NVIDIA GPU";
  if (const std::string reason = why_not_on_cuda(spec); !reason.empty()) return reason;
  if (cuda::compute_capability(in.q.device().index()) < 80)
    return "requires compute capability 8.0 or newer";
  if (in.q.scalar_type() == at::kDouble) return "supports only bfloat16, float16 and float32";
  int64_t channels = std::max(mapped_channels(spec, in.q.size(-1)), in.v.size(-1));
  if (!is<NoKeys>(spec.near)) channels = std::max(channels, in.q.size(-1));
  if (channels > cuda::kMaxChannels) return "supports head dimensions up to 256";
  const int required = cuda::fused_shared_memory(dtype_of(in.q), int(channels));
  const int available = cuda::shared_memory(in.q.device().index());
  if (required > available)
    return "requires " + std::to_string(required / 1024) +
           " KB of shared memory for this head dimension, but the GPU has " +
           std::to_string(available / 1024) + " KB";
  return "";
}

// The result, u and its rest, which in float16 share the room of float32; W, shift, r and the mean;
// running sums of the decay.
c10::SymInt kept_in_tiles(const Spec& spec, const Inputs& in) {
  if (!facts(spec.weight).of_one_score || is<Delta>(spec.values) || !is<NoKeys>(spec.near))
    return 0;
  const c10::SymInt rows = in.q.sym_size(0) * in.q.sym_size(1) * in.q.sym_size(2);
  const c10::SymInt keys = in.q.sym_size(0) * in.q.sym_size(1) * in.k.sym_size(2);
  const c10::SymInt width = (in.v.sym_size(3) + (cuda::kPad - 1)) / cuda::kPad * cuda::kPad;
  const bool narrow = in.q.scalar_type() == at::kBFloat16;
  const bool normed = in.norm_weight.defined() || in.post_gate.defined();
  const bool rest = narrow && (spec.dropout != 0 || is<Softpick>(spec.weight));
  return kept_bytes(rows * width, narrow ? 2 : 4) * (1 + int(normed) + int(rest)) +
         kept_bytes(rows * 4, sizeof(float)) +
         kept_bytes(is<NoDecay>(spec.decay) ? c10::SymInt(0) : keys, sizeof(double));
}

double work_in_tiles_on_gpu(const Spec& spec, const Inputs& in) {
  return double(in.q.size(0) * in.q.size(1)) *
         work_in_tiles(spec, in.q.size(2), in.k.size(2), in.q.size(-1), in.v.size(-1));
}

static constexpr TileKernels kKernels{
    .execution = kFusedCuda.name,
    .forward = cuda::fused_forward,
    .keys = cuda::fused_backward,
    .laid_out = laid_out,
    .dq_channels = [](const Fused& f) { return f.D; },
    .owns_keys = [](const Fused& f) { return std::max(f.D, f.E) <= 128; },
};

static at::Tensor run(const Spec& spec, const Inputs& in, Statistics* statistics) {
  if (in.q.scalar_type() == at::kHalf && needs_float32(spec)) {
    return run(spec, in_float32(in), statistics).to(at::kHalf);
  }
  if (is<Delta>(spec.values)) {
    Inputs numbers = in;
    if (in.decay.defined()) numbers.decay = in.decay.masked_fill(in.decay.isnan(), 0);
    auto [rest, with] = with_corrected_values(kFusedCuda.name, spec, numbers);
    with.v = with.v.to(in.v.scalar_type()), with.decay = in.decay;
    return run(rest, with, statistics);
  }
  if (!is<NoKeys>(spec.near)) return attend_near_on_gpu(spec, in, statistics);
  if (is<StickBreaking>(spec.weight)) return attend_sticks_on_gpu(spec, in, statistics);
  return attend_in_tiles(kKernels, spec, in, statistics);
}

static std::string why_not(const Spec& spec, const Inputs& in) {
  if (is<StickBreaking>(spec.weight))
    if (const std::string reason = why_no_sticks(spec); !reason.empty()) return reason;
  return why_not_in_tiles(spec, in);
}

// Corrected values are solved block after block, by torch's operators.
static double work(const Spec& spec, const Inputs& in) {
  return work_in_tiles_on_gpu(spec, in) * (is<Delta>(spec.values) ? 16 : 1);
}

const Execution fused_cuda = complete(kFusedCuda, why_not, run, work, kept_in_tiles);

}  // namespace horner::attn::exec

// `chunked` on an NVIDIA GPU, for weights of order 1 and 2: linear time, forward and backward. The
// kernels include the epilogue. Kernels of their own compute features (except relu of order 1 in
// bfloat16), the input gate and divisors other than the sum before them. delta_cuda.cpp has the
// delta rule, gates of channels, and other orders, widths and scores.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "attn/exec/autograd.h"
#include "attn/exec/by_series.h"
#include "attn/exec/counted_cuda.h"
#include "attn/exec/cuda.h"
#include "attn/exec/cuda_stream.h"
#include "attn/exec/delta_cuda.h"
#include "attn/exec/exec.h"
#include "attn/exec/features_cuda.h"
#include "attn/kernels/cuda/chunked/chunked.h"
#include "attn/kernels/cuda/fused/fused.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

namespace cuda = kernels::cuda;
using cuda::Chunks, cuda::Fused;

// What the kernels need besides the differentiable tensors.
struct ChunksJob {
  cuda::Quadratic w;
  float scale;
  SeenKeys keys;
  cuda::Epilogue epilogue{};  // without its pointers
  int channels;               // of the result
  bool gated;                 // the decay is of gates
  bool relu;                  // the kernels take max(x, 0) of queries and keys
};

// The memory of one kind of states.
struct StatesMemory {
  at::Tensor S, z, constant, segments;

  static StatesMemory of(const Chunks& p, const at::TensorOptions& options) {
    const int64_t n = p.records(), tiles = p.tiles(), heads = int64_t(p.f.B) * p.f.G;
    const auto floats = options.dtype(at::kFloat);
    StatesMemory m{at::empty({n, tiles, 16, 64}, options),
                   at::empty({n, tiles, cuda::kTileColumn}, options.dtype(at::kInt)),
                   at::empty({n, cuda::kConstantSums}, floats)};
    if (p.scans())
      m.segments = at::empty({heads, p.segments(), tiles + 1, cuda::kTileSums}, floats);
    return m;
  }
  cuda::ChunkStates pointers() const {
    return {S.data_ptr(), static_cast<uint32_t*>(z.data_ptr()), constant.data_ptr<float>(),
            memory<float>(segments)};
  }
};

// u is undefined where it equals o, and the states where there is one chunk. decay: the running
// sums.
struct ChunksResult {
  at::Tensor o, u, W, shift, r, decay;
  StatesMemory prefix;

  static auto outputs(auto& y) { return std::array{&y.o}; }
  static auto saved(auto& y) {
    auto& s = y.prefix;
    return std::array{&y.o,     &y.u, &y.W, &y.shift,    &y.r,
                      &y.decay, &s.S, &s.z, &s.constant, &s.segments};
  }
};

// Tokens of a chunk: longer chunks have more scores and fewer states. For order 2 memory stays
// within 1.2 of SDPA's; with 16 channels, 256 tokens would be a seventh faster.
static int chunk_tokens(const cuda::Quadratic& w, int64_t D) {
  if (w.c[2] == 0) return 128;
  return D <= 16 ? 512 : 1024;
}

// Chunks of a segment: few enough for every thread block of a large GPU to have a segment.
static int segment_chunks(const Chunks& p) {
  return int(std::clamp<int64_t>(p.records() / 256, 1, 32));
}

// q, k, v in one dtype, laid out for the kernels; decay, output and post gates in any dtype, the
// rest in float32.
static Chunks problem(const ChunksJob& job, const FusedTensors& x) {
  Chunks p{};
  Fused& f = p.f;
  f = problem_of(x, job.epilogue, job.channels);
  f.scale = job.scale, f.clamp = kNoClamp;
  f.seen = f.epilogue.counted = job.keys.seen;
  p.w = job.w, p.length = chunk_tokens(job.w, f.D);
  p.segment = segment_chunks(p), p.relu = job.relu;
  return p;
}

// The states of the keys, or of the queries, in `given` memory if it is defined; undefined where
// there is one chunk.
static StatesMemory states(Chunks& p, const at::Tensor& q, bool of_queries,
                           const StatesMemory& given = {}) {
  if (p.chunks() <= 1) return {};
  const StatesMemory m = given.S.defined() ? given : StatesMemory::of(p, q.options());
  at::Tensor sums;
  if (!p.scans()) sums = at::empty({p.records(), p.tiles(), 16}, q.options().dtype(at::kFloat));
  p.sums = memory<float>(sums);
  (of_queries ? p.suffix : p.prefix) = m.pointers();
  cuda::chunk_states(p, of_queries, stream());
  return m;
}

static ChunksResult forward(const ChunksJob& job, const FusedTensors& x, bool for_backward) {
  Chunks p = problem(job, x);
  Fused& f = p.f;
  ChunksResult r;
  r.o = at::empty({f.B, f.H, f.T, f.E}, x.q.options());
  if (for_backward) {
    if (x.norm_weight.defined() || x.post_gate.defined()) r.u = at::empty_like(r.o);
    r.W = at::empty({f.B, f.H, f.T}, x.q.options().dtype(at::kFloat));
    r.shift = at::empty_like(r.W), r.r = at::empty_like(r.W);
  }
  f.o = r.o.data_ptr(), f.u = memory<void>(r.u);
  f.W = memory<float>(r.W), f.shift = memory<float>(r.shift), f.r = memory<float>(r.r);
  r.decay = decay_sums(x.decay, job.gated), f.decay = memory<double>(r.decay);
  r.prefix = states(p, x.q, false);
  cuda::chunk_forward(p, stream());
  if (job.gated) spoil_rows(x.decay, f.seen, {}, {r.o, r.u, r.W, r.r});
  return r;
}

static FusedTensors backward(const ChunksJob& job, const FusedTensors& x, const ChunksResult& r,
                             const ChunksResult& grads) {
  Chunks p = problem(job, x);
  Fused& f = p.f;
  const at::Tensor grad = laid_out(grads.o);
  at::Tensor norm_parts;
  FusedTensors d = epilogue_gradients(x, f, norm_parts);
  d.q = at::empty({f.B, f.H, f.T, f.D}, x.q.options());
  d.k = at::empty({f.B, f.G, f.S, f.D}, x.q.options());
  d.v = at::empty({f.B, f.G, f.S, f.E}, x.q.options());
  // Unless this graph runs again, u and g share memory, and so do both kinds of states, which are
  // needed one after the other except by a scan and by the gradient of a decay.
  const bool last = !keeps_graph();
  at::Tensor g;
  if (job.epilogue.norm != cuda::Epilogue::none)
    g = last && r.u.defined() ? r.u : at::empty_like(r.o);
  const at::Tensor queries = at::empty({f.B, f.H, f.T, 4}, r.W.options());
  const DecayGradient d_decay(f, x.decay);
  at::Tensor after;
  if (f.d_decay_key) after = at::zeros({f.B, f.G, p.chunks()}, r.decay.options());
  p.d_after = memory<double>(after), f.decay = memory<double>(r.decay);
  f.o = r.o.data_ptr(), f.u = memory<void>(r.u), f.d_o = view(grad), f.g = memory<void>(g);
  f.W = memory<float>(r.W), f.shift = memory<float>(r.shift), f.r = memory<float>(r.r);
  f.queries = memory<cuda::Query>(queries);
  f.dq = d.q.data_ptr(), f.dk = d.k.data_ptr(), f.dv = d.v.data_ptr();
  cuda::row_gradients(f, polynomial(0, 1), stream());

  if (r.prefix.S.defined()) p.prefix = r.prefix.pointers();
  cuda::chunk_backward_queries(p, stream());
  const bool one_memory = last && !p.scans() && !p.d_after;
  const StatesMemory suffix = states(p, x.q, true, one_memory ? r.prefix : StatesMemory{});
  cuda::chunk_backward_keys(p, stream());
  d.decay = d_decay.of_gates(x.decay, after, p.length);
  return d;
}

static cuda::Quadratic quadratic(const Weight& w) {
  const Orders o = facts(w).orders.value();
  const auto c = [&](int n) { return o.first <= n && n <= o.last; };
  return {{c(0) ? 1.f : 0.f, c(1) ? 1.f : 0.f, c(2) ? 0.5f : 0.f}};
}

// Whether the sums are those of delta_cuda.cpp; else the kernels of chunked.h have them.
static bool is_linear(const Spec& spec, const Inputs& in) {
  return has_other_sums(spec) || spec.centred || spec.less_log_count ||
         facts(spec.weight).orders.value().last > 2 || in.q.size(2) != in.k.size(2) ||
         std::max(mapped_channels(spec, in.q.size(-1)), in.v.size(-1)) > cuda::kMaxChunkedChannels;
}

static at::Tensor run(const Spec& given, const Inputs& inputs, Statistics*) {
  if (is_linear(given, inputs)) return attend_linear(given, inputs);
  if (inputs.q.scalar_type() == at::kHalf)  // sums over tokens exceed the range of float16
    return run(given, in_float32(inputs), nullptr).to(at::kHalf);
  const WithoutChannelGates rest(given, inputs);
  const auto [spec, in] = with_forgetting(rest.spec, rest.in);
  const c10::cuda::CUDAGuard guard(in.q.device());
  const auto dtype = in.q.scalar_type();
  const CountedKeys counted(spec.mask, in);
  ChunksJob job;
  job.w = quadratic(spec.weight);
  job.channels = int(in.v.size(-1));
  job.epilogue = cuda_epilogue(spec, in);
  job.gated = is<TokenGate>(rest.spec.decay);
  job.keys = seen_keys(spec.mask, in);
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  const bool by_row = sharpness_from(spec.sharpness) == SharpnessFrom::count;
  job.relu = is<Relu>(spec.features) && !by_row && dtype == at::kBFloat16 && job.w.c[2] == 0;
  job.scale = by_row ? 1 : float(scale_factor(spec, in));
  at::Tensor of_row;
  if (by_row) of_row = scale_on_gpu(spec, in, counted);
  const Features before = job.relu ? Features{Identity{}} : spec.features;
  const at::Tensor q = mapped_on_gpu(before, in.q, in.query_projection, 1, of_row);
  const at::Tensor k = mapped_on_gpu(before, in.k, in.key_projection, repeats);
  const at::Tensor gate = value_gates(spec, in);
  const at::Tensor v =
      mapped_on_gpu(Identity{}, in.v, {}, 1, gate.defined() ? gate.unsqueeze(-1) : at::Tensor());
  FusedTensors x{laid_out(q), laid_out(k), laid_out(v)};
  x.decay = gates(log_gates(spec.decay, in));
  x.divisor = divisor_on_gpu(spec, in, counted);
  x.out_gate = gates(in.output_gate), x.post_gate = gates(in.post_gate);
  x.norm_weight = plain(in.norm_weight), x.norm_bias = plain(in.norm_bias);
  const at::Tensor o = differentiable("chunked_cuda", job, x, forward, backward).o;
  return rest.finish(o.size(-1) == in.v.size(-1) ? o : o.narrow(-1, 0, in.v.size(-1)));
}

static std::string why_not(const Spec& spec, const Inputs& in) {
  if (!in.q.is_cuda()) return "the inputs are not on an NVIDIA GPU";
  const int device = in.q.device().index();
  if (cuda::compute_capability(device) < 80) return "requires compute capability 8.0 or newer";
  if (in.q.scalar_type() == at::kDouble) return "supports only bfloat16, float16 and float32";
  if (const std::string reason = why_no_state(spec); !reason.empty()) return reason;
  Has has = kChunkedHas;
  has.sink = is_linear(spec, in);
  if (const std::string lacks = why_lacking(spec, has); !lacks.empty()) return lacks;
  if (in.cu_seqlens_k.defined()) return kNoOtherKeys;
  if (in.cu_seqlens.defined() && !is<NoKeys>(spec.near))
    return "does not support packed sequences with near keys";
  if (is_linear(spec, in)) {
    if (in.q.size(2) > in.k.size(2)) return "there are more queries than keys";
    return why_no_linear(spec, {in.q.size(0), in.k.size(1), in.q.size(-1), in.v.size(-1)});
  }
  if (const std::string lacks = WithoutChannelGates::why_not(spec); !lacks.empty()) return lacks;
  if (cuda::shared_memory(device) < cuda::chunk_shared_memory())
    return "requires " + std::to_string(cuda::chunk_shared_memory() / 1024) +
           " KB of shared memory, but the GPU has " +
           std::to_string(cuda::shared_memory(device) / 1024) + " KB";
  return "";
}

// The kernels' multiplications: heads and values of 64 channels, whole tiles of monomials; in the
// unit of work_in_tiles, which counts channels. Measured on an H200 (bfloat16, D 16 to 64, 512 to
// 16,384 tokens), one takes 1.7 times as long as one of hopper_cuda's, and half as long in the
// kernels of order 1.
static double work(const Spec& spec, const Inputs& in) {
  constexpr double kDouble = 10;  // products in double, as far as the peak rates go
  if (is_linear(spec, in) && is_by_series(spec, in))
    return kDouble * double(in.q.size(0) * in.q.size(1)) * work_by_series(spec, in);
  Chunks p{};
  p.w = quadratic(spec.weight), p.f.D = int(mapped_channels(spec, in.q.size(-1)));
  p.f.dtype = dtype_of(in.q), p.length = chunk_tokens(p.w, p.f.D);
  const double T = double(in.q.size(2)), C = std::min<double>(T, p.length);
  const double state = T <= C ? 0 : 2 * 16 * 64 * double(p.tiles() + 1);
  const double unit = (p.scans() ? 0.5 : 1.7) * double(p.f.D + in.v.size(-1)) / 128;
  return unit * double(in.q.size(0) * in.q.size(1)) * T * ((C + 128) / 2 * 128 + state);
}

const Execution chunked_cuda = complete(kChunkedCuda, why_not, run, work);

}  // namespace horner::attn::exec

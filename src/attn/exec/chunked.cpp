// Linear time: quadratic inside a chunk of tokens, a state between chunks. Tensor code around the
// kernels computes the features, the centre and the epilogue.
#include "attn/exec/chunked.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/exec/autograd.h"
#include "attn/exec/cpu.h"
#include "attn/exec/exec.h"
#include "attn/exec/isa.h"
#include "attn/kernels/cpu/chunked/chunked.h"
#include "attn/parallel.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

using kernels::Chunked;

// What the kernels need besides the differentiable tensors.
struct ChunkJob {
  Orders orders;
  int64_t D;
  Cut cut;
  double scale;
  at::Tensor keep, begins;
  bool wanted, in_place;
};

at::ScalarType sums_dtype(const Spec& spec, at::ScalarType of_inputs) {
  return of_inputs == at::kDouble || sums_in_double(spec) ? at::kDouble : at::kFloat;
}

template <class R>
static const kernels::ChunkedKernels<R>& kernels_for() {
  return *std::get<const kernels::ChunkedKernels<R>*>(isa().states);
}

// All but q, k and v may be undefined.
struct ChunkTensors {
  at::Tensor q, k, v, decay, centre, S, z;

  static auto fields(auto& x) {
    return std::array{&x.q, &x.k, &x.v, &x.decay, &x.centre, &x.S, &x.z};
  }
};

template <class R>
static Chunked<R> problem(const ChunkJob& job, const ChunkTensors& x) {
  Chunked<R> c{};
  c.B = x.q.size(0), c.H = x.q.size(1), c.G = x.k.size(1), c.T = x.q.size(2);
  c.D = job.D, c.width = x.q.size(3), c.E = x.v.size(3);
  c.first = job.orders.first, c.last = job.orders.last;
  c.weight = polynomial<R>(c.first, c.last), c.scale = R(job.scale);
  for (int p = c.first; p <= c.last; ++p) c.F += kernels::monomials(c.D, p);
  c.C = job.cut.C, c.segments = job.cut.segments, c.length = job.cut.length;
  c.q = pointer<R>(x.q), c.k = pointer<R>(x.k), c.v = pointer<R>(x.v);
  c.decay = pointer<double>(x.decay), c.centre = pointer<R>(x.centre);
  c.keep = reinterpret_cast<const uint8_t*>(pointer<bool>(job.keep));
  c.begins = reinterpret_cast<const uint8_t*>(pointer<bool>(job.begins));
  c.filled = x.S.defined();
  c.wanted = job.wanted;
  return c;
}

template <class R, class F>
static void for_each_segment(const Chunked<R>& c, const F& task) {
  for_each_task<R>(c.B * c.G * c.segments, kernels_for<R>().scratch(c),
                   [&](int64_t i, R* own) { task(c, i, own); });
}

struct ChunkResult {
  at::Tensor N, W, S, z;    // S and z: the last state, [B, G, F, E] and [B, G, F]
  at::Tensor all_S, all_z;  // [B, G, segments + 1, F, E], [.., F]

  static auto outputs(auto& r) { return std::array{&r.N, &r.W, &r.S, &r.z}; }
  static auto saved(auto& r) { return std::array{&r.all_S, &r.all_z}; }
};

template <class R>
static ChunkResult forward(const ChunkJob& job, const ChunkTensors& x, bool for_backward) {
  Chunked<R> c = problem<R>(job, x);
  const auto options = x.q.options();
  const bool stateless = c.T <= c.C && !c.filled && !c.wanted && !job.begins.defined();
  if (stateless) c.F = 0;  // one chunk, and no state to keep
  ChunkResult r;
  r.N = at::empty({c.B, c.H, c.T, c.E}, options), r.W = at::empty({c.B, c.H, c.T}, options);
  c.slots = c.segments + 1;
  if (job.in_place && !for_backward && c.filled && c.segments == 1) {
    c.slots = 1;
    r.all_S = x.S.unsqueeze(2), r.all_z = x.z.unsqueeze(2);
  } else {
    r.all_S = at::empty({c.B, c.G, c.slots, c.F, c.E}, options);
    r.all_z = at::empty({c.B, c.G, c.slots, c.F}, options);
    c.filled ? r.all_S.select(2, 0).copy_(x.S) : r.all_S.select(2, 0).zero_();
    c.filled ? r.all_z.select(2, 0).copy_(x.z) : r.all_z.select(2, 0).zero_();
  }
  c.N = pointer<R>(r.N), c.W = pointer<R>(r.W);
  c.S = pointer<R>(r.all_S), c.z = pointer<R>(r.all_z);
  const kernels::ChunkedKernels<R>& kernel = kernels_for<R>();
  if (c.segments > 1) {
    for_each_segment(c, kernel.sums);
    for_each_task(c.B * c.G, [&](int64_t i) { kernel.scan(c, i); });
  }
  for_each_segment(c, kernel.forward);
  r.S = r.all_S.select(2, -1), r.z = r.all_z.select(2, -1);
  if (for_backward) r.S = r.S.clone(), r.z = r.z.clone();
  return r;
}

template <class R>
static ChunkTensors backward(const ChunkJob& job, const ChunkTensors& x, const ChunkResult& r,
                             const ChunkResult& grads) {
  Chunked<R> c = problem<R>(job, x);
  const at::Tensor &S = r.all_S, &z = r.all_z;
  c.F = S.size(3), c.slots = S.size(2);
  const at::Tensor dN = grads.N.contiguous(), dW = grads.W.contiguous();
  const at::Tensor dS = at::empty_like(S), dz = at::empty_like(z);
  dS.select(2, c.segments).copy_(grads.S), dz.select(2, c.segments).copy_(grads.z);
  ChunkTensors d{at::empty_like(x.q), at::empty_like(x.k), at::empty_like(x.v)};
  if (x.decay.defined()) d.decay = at::zeros_like(x.decay);
  if (x.centre.defined()) d.centre = at::empty_like(x.centre);
  c.S = pointer<R>(S), c.z = pointer<R>(z), c.dS = pointer<R>(dS), c.dz = pointer<R>(dz);
  c.dN = pointer<R>(dN), c.dW = pointer<R>(dW);
  c.dq = pointer<R>(d.q), c.dk = pointer<R>(d.k), c.dv = pointer<R>(d.v);
  c.d_centre = pointer<R>(d.centre), c.d_decay = pointer<double>(d.decay);
  if (x.decay.defined() && c.wanted) {  // the last state decays with the last running sum
    const at::Tensor flow = (S.select(2, c.segments) * dS.select(2, c.segments)).sum({-1, -2}) +
                            (z.select(2, c.segments) * dz.select(2, c.segments)).sum(-1);
    d.decay.select(2, c.T - 1).add_(flow);
  }
  const kernels::ChunkedKernels<R>& kernel = kernels_for<R>();
  if (c.segments > 1) {
    for_each_segment(c, kernel.backward_sums);
    for_each_task(c.B * c.G, [&](int64_t i) { kernel.backward_scan(c, i); });
  }
  for_each_segment(c, kernel.backward);
  if (c.filled) d.S = dS.select(2, 1).clone(), d.z = dz.select(2, 1).clone();
  return d;
}

// The same in double, from tensors in float32. The gradient of a decay is a running sum of
// differences between what queries and keys take from the state. In float32 the two would be
// rounded apart, and the running sum would drift.
static ChunkTensors backward_in_double(const ChunkJob& job, const ChunkTensors& x,
                                       const ChunkResult& r, const ChunkResult& grads) {
  const auto convert = [](const auto& fields) {
    for (at::Tensor* y : fields)
      if (y->defined()) *y = y->to(at::kDouble);
  };
  ChunkTensors exact = x;
  ChunkResult saved = r, given = grads;
  convert(ChunkTensors::fields(exact));
  convert(ChunkResult::saved(saved)), convert(ChunkResult::outputs(given));
  ChunkTensors d = backward<double>(job, exact, saved, given);
  const auto inputs = ChunkTensors::fields(x);
  for (size_t i = 0; i < inputs.size(); ++i)
    if (at::Tensor* y = ChunkTensors::fields(d)[i]; y->defined())
      *y = y->to(inputs[i]->scalar_type());
  return d;
}

// Where packed sequences begin: [T], bool.
static at::Tensor beginnings(const Inputs& in) {
  if (!in.cu_seqlens.defined()) return {};
  const at::Tensor cuts = in.cu_seqlens.to(at::kLong);
  const at::Tensor begins = at::zeros({in.q.size(2) + 1}, at::kBool);
  begins.index_fill_(0, cuts, true);
  return begins.narrow(0, 0, in.q.size(2)).contiguous();
}

Cut cut(const Spec& spec, const Inputs& in) {
  const int64_t T = in.k.size(2), heads = in.k.size(0) * in.k.size(1);
  const int C = chunk_length(spec, in.q.size(-1), in.v.size(-1));
  constexpr int64_t kTasks = 8, kLeast = 1024;  // tokens of a segment
  const int64_t wanted = std::max<int64_t>(1, kTasks / std::max<int64_t>(1, heads));
  const int64_t each = std::max(kLeast, (T + wanted - 1) / wanted);
  const int64_t length = (each + C - 1) / C * C;
  return {C, (T + length - 1) / length, length};
}

at::Tensor attend_in_chunks(const Spec& spec, const Inputs& in, const Cut& cut, const Carry* before,
                            Carry* after, bool in_place) {
  const Prepared p(spec, in, before ? before->count : at::Tensor());
  const int64_t T = in.q.size(2), S = in.k.size(2), E = in.v.size(-1);
  const auto dtype = sums_dtype(spec, in.q.scalar_type());
  ChunkJob job;
  job.orders = facts(spec.weight).orders.value();
  job.D = p.q.size(-1);
  job.cut = cut;
  job.begins = beginnings(in);
  job.wanted = after != nullptr, job.in_place = in_place;
  if (in.keep.defined()) job.keep = in.keep.contiguous();

  const auto front = [&](const at::Tensor& x) {  // unused queries for the first keys
    return S == T ? x : at::constant_pad_nd(x, {0, 0, S - T, 0});
  };
  const bool one_scale = p.factor.dim() == 0;  // for all queries: the kernel multiplies
  job.scale = one_scale ? p.factor.item<double>() : 1;
  const at::Tensor q = one_scale ? p.q : p.q.to(dtype) * p.factor;
  const at::Tensor gates = value_gates(spec, in, before ? before->count : at::Tensor());
  const at::Tensor v = gates.defined() ? in.v * gates.unsqueeze(-1) : in.v;
  ChunkTensors x{padded(front(q), dtype), padded(p.k, dtype), padded(v, dtype)};
  x.decay = p.decay;
  at::Tensor keys;
  if (spec.centred) {
    keys = p.seen.sums(p.kept_keys());  // [B, G, T, D], double
    if (before && before->keys.defined()) keys = keys + before->keys.unsqueeze(2);
    const at::Tensor mean = (keys / p.count.clamp_min(1)).repeat_interleave(p.repeats, 1);
    x.centre = (q * mean).sum(-1) * job.scale;
  }
  if (spec.less_log_count) x.centre = x.centre.defined() ? x.centre + p.log_count() : p.log_count();
  if (x.centre.defined())
    x.centre = front(x.centre.unsqueeze(-1)).squeeze(-1).to(dtype).contiguous();
  if (before && before->S.defined()) {
    x.S = padded(before->S, dtype), x.z = before->z.to(dtype).contiguous();
  }
  const bool exact = dtype == at::kDouble;
  const bool drifts = in.q.scalar_type() == at::kFloat && x.decay.defined();
  const ChunkResult r = differentiable("chunked", job, x, exact ? forward<double> : forward<float>,
                                       exact    ? backward<double>
                                       : drifts ? backward_in_double
                                                : backward<float>);

  const auto part = [](const at::Tensor& x, int64_t axis, int64_t n) {  // the last n
    return n == x.size(axis) ? x : x.narrow(axis, x.size(axis) - n, n);
  };
  at::Tensor N = part(r.N, 2, T), W = part(r.W, 2, T).unsqueeze(-1);
  if (E < N.size(-1)) N = N.narrow(-1, 0, E);
  Sums sums{N, W, at::zeros({1}, N.options()), p.count, {}};
  if (in.denominator_gate.defined()) {
    sums.gates = p.gates(in);
    if (before && before->gates.defined())
      sums.gates =
          sums.gates + before->gates.repeat_interleave(p.repeats, 1).view({-1, in.q.size(1), 1, 1});
  }
  if (after) {
    const int64_t B = in.q.size(0);
    Carry next{r.S.contiguous(), r.z.contiguous(), {}, {}, {}, {}};
    next.count = p.count.select(2, T - 1).reshape({-1}).to(at::kDouble).expand({B}).contiguous();
    if (spec.centred) next.keys = keys.select(2, T - 1);
    if (sums.gates.defined())
      next.gates = sums.gates.to(at::kDouble)
                       .view({B, in.k.size(1), p.repeats, T})
                       .select(2, 0)
                       .select(-1, T - 1);
    if (p.decay.defined()) {
      next.decay = p.decay.select(2, S - 1);
      if (before && before->decay.defined()) next.decay = next.decay + before->decay;
    }
    *after = next;
  }
  return finish(spec, in, sums);
}

std::string why_no_stream(const Spec& spec, const Inputs& in) {
  if (!in.q.is_cpu()) return "the inputs are not on the CPU";
  const std::string reason = why_no_state(spec);
  if (!reason.empty()) return reason;
  if (in.q.size(2) > in.k.size(2)) return "there are more queries than keys";
  if (in.k.size(2) <= cut(spec, in).C && !in.cu_seqlens.defined())
    return "";  // one chunk: no state
  const StateShape shape{in.q.size(0), in.k.size(1), in.q.size(-1), in.v.size(-1)};
  return why_too_large(spec, shape);
}

std::string why_no_sums(const Spec& spec, const Inputs& in) {
  if (in.q.scalar_type() == at::kDouble) return "supports only float32, bfloat16 and float16";
  return why_no_stream(spec, in);
}

static double work(const Spec& spec, const Inputs& in) {
  return double(in.q.size(0) * in.q.size(1)) *
         work_in_chunks(spec, in.k.size(2), in.q.size(-1), in.v.size(-1));
}

static at::Tensor run(const Spec& spec, const Inputs& in, Statistics*) {
  return attend_in_chunks(spec, in, cut(spec, in));
}

const Execution chunked{
    .name = "chunked",
    .about = "chunks of tokens with a state between them: linear time",
    .why_not = why_no_sums,
    .run = run,
    .statistics = false,
    .work = work,
};

}  // namespace horner::attn::exec

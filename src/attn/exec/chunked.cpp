// Linear time: quadratic inside a chunk of tokens, a state between chunks. Tensor code around the
// kernels computes the features, the centre and the epilogue.
#include "attn/exec/chunked.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attn/exec/autograd.h"
#include "attn/exec/chunk_rows.h"
#include "attn/exec/cpu.h"
#include "attn/exec/exec.h"
#include "attn/exec/large.h"
#include "attn/exec/near.h"
#include "attn/inputs.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

at::ScalarType sums_dtype(const Spec& spec, at::ScalarType of_inputs) {
  return of_inputs == at::kDouble || sums_in_double(spec) ? at::kDouble : at::kFloat;
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

// In double where the tensors are; the backward pass also where a gradient would drift otherwise.
static ChunkResult sums(const RowsJob& job, const ChunkTensors& x, bool drifts) {
  const bool exact = x.q.scalar_type() == at::kDouble;
  return differentiable(
             "chunked", job, x, exact ? chunk_rows<double> : chunk_rows<float>,
             exact    ? chunk_rows_backward<double>
             : drifts ? in_double<RowsJob, ChunkTensors, RowsResult, chunk_rows_backward<double>>
                      : chunk_rows_backward<float>)
      .sums;
}

// W as given, and nothing else.
static bool is_plain_sum(const Denominator& z) {
  const Sum* s = std::get_if<Sum>(&z);
  return s && s->plus == 0 && s->least == 0 && s->floor == 0 && !s->detach && !s->sink;
}

// The values of the delta rule.
static at::Tensor corrected(const Spec& spec, const Inputs& in, const ChunkJob& job,
                            const ChunkTensors& x, bool drifts) {
  const at::Tensor share = key_shares(spec, in, x.k).contiguous();
  const DeltaTensors keys{x.k, x.v, share, x.decay, x.channels, x.S};
  const bool exact = x.k.scalar_type() == at::kDouble;
  return differentiable(
             "chunked", job, keys, exact ? delta_values<double> : delta_values<float>,
             exact ? delta_values_backward<double>
             : drifts
                 ? in_double<ChunkJob, DeltaTensors, DeltaResult, delta_values_backward<double>>
                 : delta_values_backward<float>)
      .u;
}

// How many keys the sums serve, up to each query.
static at::Tensor served(const Prepared& p, const std::optional<Near>& near, const Carry* before) {
  if (!near) return p.count;
  const at::Tensor n = p.seen.sums(near->keep.unsqueeze(1).unsqueeze(3));
  if (!before || !before->near_keep.defined()) return n;
  return n + (before->count - before->near_keep.sum(1)).view({-1, 1, 1, 1});
}

// What centred scores need: the sum of the keys that the series serves, up to each query, and its
// product with the query over their number.
struct Centre {
  at::Tensor keys;  // [B, G, T, D], double
  at::Tensor mean;  // [B, H, T]

  // q: times its factor. late: the mapped keys where some are near.
  Centre(const Prepared& p, const at::Tensor& q, const std::optional<Near>& near,
         const at::Tensor& late, const Carry* before) {
    if (near) {
      const at::Tensor kept = near->keep.unsqueeze(1).unsqueeze(3);
      keys = p.seen.sums(late.masked_fill(kept.logical_not(), 0));
    } else {
      keys = p.seen.sums(p.kept_keys());
    }
    if (before && before->keys.defined()) keys = keys + before->keys.unsqueeze(2);
    const at::Tensor count = served(p, near, before);
    mean = (q * (keys / count.clamp_min(1)).repeat_interleave(p.repeats, 1)).sum(-1);
  }
};

at::Tensor attend_in_chunks(const Spec& given, const Inputs& in, const Cut& cut,
                            const Carry* before, Carry* after, bool in_place) {
  Spec spec = given;  // without what the sums do
  const bool all_far = is<NoKeys>(spec.near);
  RowsJob rows{.features = Identity{}, .divided = all_far && is_plain_sum(spec.denominator)};
  const bool as_given =
      all_far && !spec.centred && is<Flat>(spec.sharpness) && !is<Delta>(spec.values);
  if (as_given && is_elementwise(spec.features))
    rows.features = std::exchange(spec.features, Identity{});
  if (rows.divided) spec.denominator = Nothing{};
  const Prepared p(spec, in, before ? before->count : at::Tensor());
  const int64_t T = in.q.size(2), S = in.k.size(2), E = in.v.size(-1);
  const auto dtype = sums_dtype(spec, in.q.scalar_type());
  ChunkJob& job = rows.chunks;
  job.orders = facts(spec.weight).orders.value();
  job.D = p.q.size(-1);
  job.cut = cut;
  job.begins = beginnings(in);
  job.wanted = after != nullptr, job.in_place = in_place;
  if (in.keep.defined()) job.keep = in.keep.contiguous();

  const auto front = [&](const at::Tensor& x) {  // unused queries for the first keys
    return S == T ? x : at::constant_pad_nd(x, {0, 0, S - T, 0});
  };
  job.scale = p.one_factor.value_or(1);  // one for all queries: the kernel multiplies
  at::Tensor q = p.one_factor ? p.q : p.q.to(dtype) * p.factor;
  if (in.slope.defined() && in.slope.isnan().any().item<bool>()) {  // of a row's own key as well
    const at::Tensor nan = at::where(in.slope.isnan(), NAN, 0.0).repeat_interleave(p.repeats);
    q = q + nan.view({1, -1, 1, 1}).to(q.scalar_type());
  }
  const at::Tensor gates = value_gates(spec, in, before ? before->count : at::Tensor());
  const at::Tensor v = gates.defined() ? in.v * gates.unsqueeze(-1) : in.v;
  std::optional<Near> near;
  at::Tensor late;  // keys
  if (!all_far) {
    near.emplace(spec, in, v, before);
    late = mapped(spec.features, near->k, in.key_projection, p.repeats);
    job.keep = near->keep;
  }
  if (in.keep.defined())  // sums of no key are 0, and NaN times that is not
    q = at::where(served(p, near, before) > 0, q, at::zeros({}, q.options()));
  ChunkTensors x{padded(front(q), dtype), padded(near ? late : p.k, dtype),
                 padded(near ? near->v : v, dtype)};
  x.decay = near && near->logs.defined() ? near->logs.cumsum(-1) : p.decay;
  at::Tensor keys, centre;  // of each query: the sum of keys, and what its scores are less
  if (spec.centred) {
    const Centre of(p, q, near, late, before);
    keys = of.keys, centre = of.mean * job.scale;
  }
  if (spec.less_log_count) {
    const at::Tensor log = log_count(p.count, in);
    centre = centre.defined() ? centre + log : log;
  }
  if (centre.defined()) {
    centre = centre.unsqueeze(-1);
    x.centre = front(centre).squeeze(-1).to(dtype).contiguous();
  }
  if (before && before->S.defined()) {
    x.S = padded(before->S, dtype), x.z = before->z.to(dtype).contiguous();
  }
  if (is<ChannelGate>(spec.decay)) x.channels = padded(channel_logs(in), at::kDouble);
  const bool drifts = in.q.scalar_type() == at::kFloat && !is<NoDecay>(spec.decay);
  if (is<Delta>(spec.values)) x.v = corrected(spec, in, job, x, drifts);
  const ChunkResult r = sums(rows, x, drifts);

  const auto part = [](const at::Tensor& x, int64_t axis, int64_t n) {  // the last n
    return n == x.size(axis) ? x : x.narrow(axis, x.size(axis) - n, n);
  };
  at::Tensor N = part(r.N, 2, T), W = part(r.W, 2, T).unsqueeze(-1);
  if (E < N.size(-1)) N = N.narrow(-1, 0, E);
  Sums sums{N, W, at::zeros({1}, N.options()), p.count, {}};
  if (near) sums = near->with(sums, in.q, p.count, centre);
  if (in.denominator_gate.defined()) {
    sums.gates = p.gates(in);
    if (before && before->gates.defined())
      sums.gates =
          sums.gates + before->gates.repeat_interleave(p.repeats, 1).view({-1, in.q.size(1), 1, 1});
  }
  if (after) {
    const int64_t B = in.q.size(0);
    Carry next{r.S.contiguous(), r.z.contiguous()};
    next.count = p.count.select(2, T - 1).reshape({-1}).to(at::kDouble).expand({B}).contiguous();
    if (spec.centred) next.keys = keys.select(2, T - 1).contiguous();
    if (near) near->leave(next);
    if (sums.gates.defined())
      next.gates = sums.gates.to(at::kDouble)
                       .view({B, in.k.size(1), p.repeats, T})
                       .select(2, 0)
                       .select(-1, T - 1);
    if (!is<NoDecay>(spec.decay)) {
      next.decay = near                ? near->decay_of_tokens()
                   : p.decay.defined() ? p.decay.select(2, S - 1)
                                       : channel_logs(in).sum(2);
      if (before && before->decay.defined()) next.decay = next.decay + before->decay;
    }
    *after = next;
  }
  return finish(spec, in, sums);
}

// In pieces of the tokens all tensors stay within the memory that malloc keeps when it is freed.
static bool in_pieces(const Spec& spec) {
  return is<Delta>(spec.values) || is<ChannelGate>(spec.decay) || !is<NoKeys>(spec.near);
}
constexpr int64_t kLeastPiece = 2048;
int64_t piece_tokens(const Spec& spec, const Inputs& in) {
  constexpr int64_t kMostBytes = 2 << 20, kUnit = 1024;
  if (!in_pieces(spec)) return in.k.size(2);
  const auto* near = std::get_if<Window>(&spec.near);
  const int64_t channels = std::max({in.q.size(3), in.v.size(3), near ? 2L * near->size : 0});
  const int64_t token = in.q.size(0) * in.q.size(1) * channels * int64_t(sizeof(double));
  return std::max(kLeastPiece, kMostBytes / std::max<int64_t>(1, token) / kUnit * kUnit);
}

std::string why_no_stream(const Spec& spec, const Inputs& in) {
  if (!in.q.is_cpu()) return "the inputs are not on the CPU";
  if (const std::string reason = why_no_state(spec); !reason.empty()) return reason;
  if (spec.dropout != 0)
    return "does not support dropout: it leaves out pairs of a query and a key, and a state does "
           "not hold pairs";
  if (const std::string lacks = why_lacking(spec, kChunkedHas); !lacks.empty()) return lacks;
  if (in.cu_seqlens_k.defined()) return kNoOtherKeys;
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

// What the nodes of all pieces keep, at most, where the channels have known numbers: N and W as
// results and for backward, mapped queries and keys, values of the delta rule; of each piece the
// last state and all states, of which `cut` makes at most 2 for each head and 8 more.
static c10::SymInt kept(const Spec& spec, const Inputs& in) {
  const auto D = in.k.sym_size(3).maybe_as_int(), E = in.v.sym_size(3).maybe_as_int();
  if (!D || !E) return 0;
  const c10::SymInt S = in.k.sym_size(2), heads = in.k.sym_size(0) * in.k.sym_size(1);
  const c10::SymInt rows = in.q.sym_size(0) * in.q.sym_size(1) * S;
  const c10::SymInt pieces = in_pieces(spec) ? S / kLeastPiece + 1 : c10::SymInt(1);
  const bool too_large = !why_too_large(spec, {1, 1, *D, *E}).empty();  // a chunk without a state
  const int64_t F = too_large ? 0 : int64_t(feature_count(spec, *D));
  const c10::SymInt width = padded(in.v.sym_size(3));
  const bool always = in.cu_seqlens.defined() || is<ChannelGate>(spec.decay);
  const c10::SymInt has_state =
      always ? c10::SymInt(1) : (S / (chunk_length(spec, *D, *E) + 1)).min(c10::SymInt(1));
  const bool maps = !is<Identity>(spec.features), delta = is<Delta>(spec.values);
  const c10::SymInt linear = 2 * rows * (width + 1) + (delta ? 2 * heads * S * width : 0) +
                             (maps ? (rows + heads * S) * padded(in.k.sym_size(3)) : 0);
  const c10::SymInt states = pieces * has_state * (3 * heads + 8) * F * (width + 1);
  const int64_t size = sums_dtype(spec, in.q.scalar_type()) == at::kDouble ? 8 : 4;
  constexpr int64_t kTensors = 12;
  return (linear + states) * size + pieces * kTensors * kept_bytes(0, 1);
}

// One piece of the tokens after another, through the state.
static at::Tensor run(const Spec& spec, const Inputs& in, Statistics*) {
  const int64_t S = in.k.size(2), n = piece_tokens(spec, in);
  if (S <= n || in.q.size(2) != S || in.cu_seqlens.defined())
    return attend_in_chunks(spec, in, cut(spec, in));
  std::vector<Inputs> pieces(size_t((S + n - 1) / n), in);
  for (const Input& i : input_table()) {
    const int64_t axis = axis_of(i, "TS");
    if (!(in.*i.at).defined() || axis < 0) continue;
    const TensorVector each = parts("chunked", in.*i.at, n, axis);
    for (size_t p = 0; p < each.size(); ++p) pieces[p].*i.at = each[p];
  }
  Carry state;
  std::vector<at::Tensor> results;
  for (const Inputs& piece : pieces) {
    const Carry before = state;
    const bool first = results.empty(), last = results.size() + 1 == pieces.size();
    results.push_back(attend_in_chunks(spec, piece, cut(spec, piece), first ? nullptr : &before,
                                       last ? nullptr : &state));
  }
  return at::cat(results, 2);
}

const Execution chunked{
    .name = "chunked",
    .about = "chunks of tokens with a state between them: linear time",
    .why_not = why_no_sums,
    .run = run,
    .statistics = false,
    .work = work,
    .kept = kept,
};

}  // namespace horner::attn::exec

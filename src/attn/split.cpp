#include "attn/split.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attn/exec/by_series.h"
#include "attn/exec/chunked.h"
#include "attn/exec/exec.h"
#include "attn/exec/ring.h"
#include "attn/inputs.h"
#include "attn/plan.h"
#include "attn/recompute.h"
#include "attn/stages.h"
#include "attn/state.h"
#include "core/check.h"

namespace horner::attn {

namespace {

using torch::autograd::AutogradContext;

struct Held : torch::CustomClassHolder {
  Split split;
  explicit Held(Split s) : split(std::move(s)) {}
};

struct Gather : torch::autograd::Function<Gather> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Split& split) {
    ctx->saved_data["split"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(split));
    return split.gather(x.contiguous());
  }
  static std::vector<at::Tensor> backward(AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    const auto held =
        c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["split"].toCapsule());
    return {held->split.scatter_sum(grads[0].contiguous()), at::Tensor()};
  }
};

}  // namespace

at::Tensor gathered(const Split& split, const at::Tensor& x) {
  if (x.is_floating_point()) return Gather::apply(x, split);
  return split.gather(x.contiguous());
}

at::Tensor sum_before(const Split& split, const at::Tensor& x) {
  return gathered(split, x).narrow(0, 0, split.rank).sum(0);
}

at::Tensor rows_before(const Split& split, const at::Tensor& x, int64_t axis, int64_t n) {
  const int64_t T = x.size(axis);
  check(T >= n, "each of the ", split.ranks, " ranks of a sequence needs ", n,
        " tokens or more, not ", T, "; choose a larger --length or a smaller --context-parallel");
  // On the first rank this sums no rows.
  const int64_t before = std::max(0, split.rank - 1), one = split.rank > 0;
  return gathered(split, x.narrow(axis, T - n, n)).narrow(0, before, one).sum(0);
}

std::string why_no_split(const Spec& spec) {
  if (sees_future(spec.mask)) return "its mask sees later tokens";
  if (spec.dropout != 0 || spec.bias) return "it has dropout or a bias of each score";
  return "";
}

// Why there is no state of a spec; "" if there is one, of any size.
static std::string why_no_scan(const Spec& spec, bool on_gpu) {
  if (!is<NoKeys>(spec.near)) return "near keys are not part of a state";
  if (is<CountPower>(spec.values)) return "values depend on the count of keys before them";
  return on_gpu ? exec::why_no_series(spec) : why_no_state(spec);
}

// Why blocks of keys cannot go round; "" if they can.
static std::string why_no_ring(const Spec& spec) {
  if (needs_the_row(spec)) return "its weights depend on the whole row";
  if (!is<NoKeys>(spec.near)) return "near keys have other weights than those before them";
  if (!is<AsGiven>(spec.values)) return "values depend on the keys before them";
  if (spec.centred) return "scores depend on the mean of all keys";
  if (is<CumulativeGate>(spec.denominator)) return "its denominator is a sum over all keys";
  if (is<ChannelGate>(spec.decay)) return "each channel has a decay of its own";
  return "";
}

static bool can_go_round(const Spec& spec, const Inputs& in, std::string_view execution) {
  if (!why_no_ring(spec).empty() || in.keep.defined()) return false;  // it is counted over all keys
  const Execution* const merging[] = {&exec::fused_cpu, &exec::fused_cuda, &exec::hopper_cuda};
  return std::ranges::any_of(merging, [&](const Execution* e) {
    return (execution == "auto" || execution == e->name) && e->why_not(spec, in).empty();
  });
}

static double padded(double n, double multiple) {
  return std::ceil(n / multiple) * multiple;
}
static constexpr double kPad = 16;  // channels of a state

double state_message(const Spec& spec, const SplitShape& s) {
  const double F = feature_count(spec, s.D), heads = double(s.B) * double(s.G);
  const double E = padded(double(s.E), kPad);
  const double width = is<Delta>(spec.values) ? padded(E + F, kPad) : E;
  double exact = double(s.B);  // the count, and other sums in double
  if (spec.centred) exact += heads * double(mapped_channels(spec, s.D));
  if (is<CumulativeGate>(spec.denominator)) exact += heads;
  if (!is<NoDecay>(spec.decay)) exact += heads * (is<ChannelGate>(spec.decay) ? F : 1);
  return heads * F * (width + 1) * (sums_in_double(spec) ? sizeof(double) : sizeof(float)) +
         sizeof(double) * exact;
}

double block_message(const Spec& spec, const SplitShape& s) {
  const double multiple = s.on_gpu ? 8 : 16;  // of the kernels
  const double channels =
      padded(double(mapped_channels(spec, s.D)), multiple) + padded(double(s.E), multiple);
  const double gates = spec.input_gate * sizeof(float) + !is<NoDecay>(spec.decay) * sizeof(double);
  return double(s.B) * double(s.G) * double(s.tokens) * (channels * double(s.element) + gates);
}

static Travels travels(const Spec& spec, const SplitShape& s, bool has_state, bool goes_round) {
  has_state &= why_too_large(spec, {s.B, s.G, s.D, s.E}).empty();
  if (goes_round && !(has_state && state_message(spec, s) <= block_message(spec, s)))
    return Travels::blocks_of_keys;
  return has_state ? Travels::states : Travels::all_keys;
}

Travels travels(const Spec& spec, const SplitShape& s) {
  return travels(spec, s, why_no_scan(spec, s.on_gpu).empty(), why_no_ring(spec).empty());
}

Travels travels(const Spec& spec, const Inputs& in, std::string_view execution) {
  Inputs one = in;
  one.cu_seqlens = at::Tensor();
  const bool on_gpu = in.q.is_cuda();
  const bool has_state =
      why_no_scan(spec, on_gpu).empty() && (on_gpu || exec::why_no_stream(spec, one).empty());
  return travels(spec,
                 {in.k.size(0), in.k.size(1), in.k.size(3), in.v.size(3), in.k.size(2),
                  int64_t(in.k.element_size()), on_gpu},
                 has_state, can_go_round(spec, in, execution));
}

namespace {

// The tokens of this rank among those of all, and the packed sequences.
struct Places {
  int64_t T, from;            // tokens, and the place of the first
  std::vector<int64_t> cuts;  // 0, .., of all ranks

  Places(const Inputs& in, const Split& split)
      : T(in.k.size(2)), from(split.rank * T), cuts{0, split.ranks * T} {
    if (!in.cu_seqlens.defined()) return;
    const at::Tensor c = in.cu_seqlens.to(at::kCPU, at::kLong).contiguous();
    cuts.assign(c.data_ptr<int64_t>(), c.data_ptr<int64_t>() + c.numel());
    check(cuts.size() >= 2 && cuts.front() == 0 && cuts.back() == split.ranks * T,
          "cu_seqlens must go from 0 to ", split.ranks * T, ", the tokens of all ranks, not from ",
          cuts.empty() ? 0 : cuts.front(), " to ", cuts.empty() ? 0 : cuts.back());
  }
  // The first token of the sequence that token t belongs to.
  int64_t begin_of(int64_t t) const {
    return *std::prev(std::upper_bound(cuts.begin(), std::prev(cuts.end()), t));
  }
  // Where the sequences of [lo, hi) begin and end, counted from lo.
  std::vector<int64_t> within(int64_t lo, int64_t hi) const {
    std::vector<int64_t> out{0};
    for (const int64_t c : cuts)
      if (c > lo && c < hi) out.push_back(c - lo);
    out.push_back(hi - lo);
    return out;
  }
};

// What only the sums of keys and values need: no norm, no gates of the output, and as few query
// heads as there are key heads.
std::pair<Spec, Inputs> sums_only(Spec spec, Inputs in) {
  spec.norm = NoNorm{}, spec.output_gate = spec.post_gate = spec.channel_gates = false;
  spec.sharpness = Flat{}, spec.less_log_count = false;
  if (!is<CumulativeGate>(spec.denominator)) spec.denominator = Nothing{};
  const int64_t G = in.k.size(1);
  in.q = in.q.detach().narrow(1, 0, G);
  if (in.query_projection.defined())
    in.query_projection = in.query_projection.detach().narrow(0, 0, G);
  for (at::Tensor* x : {&in.output_gate, &in.post_gate, &in.length_scale, &in.log_power, &in.sink,
                        &in.norm_weight, &in.norm_bias, &in.cu_seqlens})
    *x = at::Tensor();
  return {spec, in};
}

// What travels of a state, and whether a spec has it.
constexpr at::Tensor Carry::* kSums[] = {&Carry::S,    &Carry::z,     &Carry::count,
                                         &Carry::keys, &Carry::gates, &Carry::decay};
bool has_sum(const Spec& spec, at::Tensor Carry::* x) {
  if (x == &Carry::keys) return spec.centred;
  if (x == &Carry::gates) return is<CumulativeGate>(spec.denominator);
  return x != &Carry::decay || !is<NoDecay>(spec.decay);
}

// All tokens through the state, in pieces whose working memory is small: [B, H, T, E] unless only
// the sums are wanted, and the state after them.
std::pair<at::Tensor, Carry> attend_on(const Spec& spec, const Inputs& in, const Carry& before,
                                       bool only_sums) {
  std::vector<at::Tensor Inputs::*> places;
  Tensors inputs, state;
  Chain chain;
  for (const Input& i : input_table()) {
    if (!(in.*i.at).defined()) continue;
    places.push_back(i.at), inputs.push_back(in.*i.at);
    chain.axes.push_back(axis_of(i, "TS"));
  }
  for (at::Tensor Carry::* each : kSums)
    if (has_sum(spec, each)) state.push_back(before.*each);
  chain.tokens = in.k.size(2);
  chain.piece = std::clamp<int64_t>(exec::piece_tokens(spec, in) / 4, 2048, 8192);
  chain.run = [=](const Tensors& x, const Tensors& given) {
    Inputs piece;
    Carry start, after;
    for (size_t i = 0; i < places.size(); ++i) piece.*places[i] = x[i];
    size_t next = 0;
    for (at::Tensor Carry::* each : kSums)
      if (has_sum(spec, each)) start.*each = given[next++];
    if (only_sums && is<Delta>(spec.values))
      piece.v = at::constant_pad_nd(piece.v, {0, start.S.size(3) - piece.v.size(3)});
    const at::Tensor o = piece.q.is_cuda() ? exec::attend_by_series(spec, piece, start, after)
                                           : attend_from(spec, piece, start, &after);
    Tensors left;
    for (at::Tensor Carry::* each : kSums)
      if (has_sum(spec, each)) left.push_back(after.*each);
    return std::pair(only_sums ? at::Tensor() : o, left);
  };
  const auto [o, left] = chained(chain, inputs, state);
  Carry after;
  size_t next = 0;
  for (at::Tensor Carry::* each : kSums)
    if (has_sum(spec, each)) after.*each = left[next++];
  return {o, after};
}

// The sums of this rank's tokens, from an empty state. With the delta rule S has F columns more, at
// first of the identity: they become the matrix A by which the tokens change a state.
Carry own_sums(const Spec& given, const Inputs& all, int64_t padded_E) {
  const auto [spec, in] = sums_only(given, all);
  Carry start;
  if (is<Delta>(spec.values)) {
    const auto F = int64_t(feature_count(spec, in.k.size(3)));
    const at::TensorOptions options =
        in.v.options().dtype(exec::sums_dtype(spec, in.q.scalar_type()));
    const int64_t B = in.k.size(0), G = in.k.size(1);
    start.S = at::cat({at::zeros({F, padded_E}, options), at::eye(F, options)}, 1)
                  .expand({B, G, F, padded_E + F});
    start.z = at::zeros({B, G, F}, options);
    start.count = at::zeros({B}, options.dtype(at::kDouble));
  }
  return attend_on(spec, in, start, true).second;
}

// The gathered tensors of a Carry, [ranks, B, ..]; undefined where it has none.
Carry gathered_carry(const Split& split, const Carry& own) {
  Carry out;
  for (at::Tensor Carry::* x : kSums)
    if ((own.*x).defined()) out.*x = gathered(split, own.*x);
  return out;
}

// The state before rank r, of the ranks from `first` on.
Carry combined(const Spec& spec, const Carry& all, int64_t first, int64_t r, int64_t E) {
  const int64_t n = r - first;
  const auto some = [&](const at::Tensor& x) { return x.narrow(0, first, n); };
  const auto sum = [&](const at::Tensor& x) { return x.defined() ? some(x).sum(0) : x; };
  Carry out{.count = sum(all.count), .keys = sum(all.keys), .gates = sum(all.gates)};
  out.decay = sum(all.decay);
  at::Tensor z = some(all.z), S = some(all.S);
  at::Tensor later;  // the factor of each rank's sums: the decay of the ranks after it
  if (all.decay.defined()) {
    const at::Tensor logs = some(all.decay);
    later = (logs.sum(0, true) - logs.cumsum(0)).exp().to(z.scalar_type());
    later = later.dim() == 3 ? later.unsqueeze(-1) : later;  // [n, B, G, 1] or [.., F]
    z = z * later;
  }
  out.z = z.sum(0);
  if (!is<Delta>(spec.values)) {
    out.S = (later.defined() ? S * later.unsqueeze(-1) : S).sum(0);
    return out;
  }
  const int64_t F = S.size(3);
  out.S = S.narrow(4, 0, E).narrow(0, 0, 0).sum(0);  // zeros
  for (int64_t j = 0; j < n; ++j)
    out.S = at::matmul(S[j].narrow(-1, E, F), out.S) + S[j].narrow(-1, 0, E);
  return out;
}

// Log gates without NaN, and exec::spoiled_rows, as in run_with_gates; undefined where there is no
// NaN. On the CPU only.
struct Gates {
  Inputs clean;
  at::Tensor rows;
};
// Of rows that see all tokens up to their own, and others before these if they `follow`.
Gates without_nan(const Inputs& in, bool follow) {
  Gates out{in, {}};
  if (in.q.is_cuda() || !exec::has_nan_gates(in)) return out;
  at::Tensor& gates = in.decay.defined() ? out.clean.decay : out.clean.channel_decay;
  at::Tensor nan = gates.detach().isnan();
  gates = gates.masked_fill(nan, 0);
  if (nan.dim() == 4) nan = nan.any(-1);
  if (follow) nan = at::cat({at::zeros_like(nan.narrow(2, 0, 1)), nan}, 2);
  const at::Tensor last = at::arange(follow, in.q.size(2) + follow, at::kLong).unsqueeze(0);
  out.rows = exec::spoiled_rows(nan, at::zeros_like(last), last, in);
  return out;
}

at::Tensor times(const at::Tensor& o, const at::Tensor& factor) {
  return factor.defined() ? (o * factor).to(o.scalar_type()) : o;
}

// The result `first` of the sequence that the first token belongs to, and those that begin after
// it.
at::Tensor with_rest(const at::Tensor& first, const Spec& spec, const Inputs& in, const Places& at,
                     std::string_view execution) {
  const int64_t n = first.size(2);
  if (n == at.T) return first;
  std::vector<int64_t> cuts = at.within(at.from + n, at.from + at.T);
  Inputs rest = in;
  rest.cu_seqlens = at::Tensor();
  rest = tokens(rest, n, at.T);
  rest.cu_seqlens = at::tensor(cuts, at::kLong).to(in.cu_seqlens.options());
  return at::cat({first, attend(spec, rest, execution)}, 2);
}

at::Tensor by_state(const Spec& spec, const Inputs& in, const Split& split,
                    std::string_view execution) {
  const Places at(in, split);
  const auto E = int64_t(padded(double(in.v.size(3)), kPad));
  Inputs own = in;
  own.cu_seqlens = at::Tensor();
  const bool may_clean = in.q.is_cpu() && exec::has_nan_gates(in);
  const auto some = [&](int64_t lo, int64_t hi) {
    const Inputs x = tokens(own, lo, hi);
    return may_clean && at.begin_of(at.from + lo) == at.from + lo ? without_idle_gates(x) : x;
  };
  const int64_t last = std::max<int64_t>(0, at.begin_of(at.from + at.T - 1) - at.from);
  const Carry all = gathered_carry(split, own_sums(spec, some(last, at.T), E));
  // The sequence of the first token began on rank `first`; this one, if none comes before.
  const int64_t begin = at.begin_of(at.from), first = std::min<int64_t>(begin / at.T, split.rank);
  const Carry before = combined(spec, all, first, split.rank, E);
  const int64_t n = at.within(at.from, at.from + at.T)[1];
  const Gates gates = without_nan(some(0, n), /*follow=*/begin < at.from);
  const at::Tensor o = attend_on(spec, gates.clean, before, false).first;
  return with_rest(times(o, gates.rows), spec, in, at, execution);
}

// [.., S, ..] of the ranks up to this one, from token `begin` on.
at::Tensor keys_up_to(const Split& split, const at::Tensor& x, int64_t axis, int64_t begin) {
  const int64_t T = x.size(axis), n = (split.rank + 1) * T;
  const bool mask = x.scalar_type() == at::kBool;
  const at::Tensor all = gathered(split, mask ? x.to(at::kByte) : x);
  const at::Tensor up_to = all.narrow(0, 0, split.rank + 1).movedim(0, axis);
  const at::Tensor flat = up_to.flatten(axis, axis + 1).narrow(axis, begin, n - begin);
  return mask ? flat.to(at::kBool) : flat;
}

at::Tensor by_keys(const Spec& spec, const Inputs& in, const Split& split,
                   std::string_view execution) {
  const Places at(in, split);
  const int64_t begin = at.begin_of(at.from), n = at.within(at.from, at.from + at.T)[1];
  Inputs first = in;
  first.cu_seqlens = at::Tensor();
  for (const Input& i : input_table()) {
    const int64_t of_keys = axis_of(i, "S"), of_queries = axis_of(i, "T");
    at::Tensor& x = first.*i.at;
    if (!x.defined()) continue;
    if (of_keys >= 0)
      x = keys_up_to(split, x, of_keys, begin).narrow(of_keys, 0, at.from + n - begin);
    else if (of_queries >= 0)
      x = x.narrow(of_queries, 0, n);
  }
  return with_rest(attend(spec, first, execution), spec, in, at, execution);
}

// The keys that the queries of this rank see, counted from the first token of all ranks.
exec::Intervals keys_of_all(const Spec& spec, const Inputs& in, const Places& at) {
  const int64_t n = at.from + at.T;
  Inputs all;  // of their shapes alone
  all.q = all.k = at::empty({1, 1, n, 0});
  if (in.cu_seqlens.defined()) all.cu_seqlens = at::tensor(at.within(0, n), at::kLong);
  exec::Intervals seen(spec.mask, all);
  for (at::Tensor* end : {&seen.lo, &seen.hi, &seen.from, &seen.to})
    if (end->defined()) *end = end->narrow(0, at.from, at.T);
  return seen;
}

at::Tensor by_ring(const Spec& spec, const Inputs& in, const Split& split) {
  const Places at(in, split);
  Inputs own = in;
  own.cu_seqlens = at::Tensor();
  check_inputs(spec, own);
  exec::Ring ring{split.rank, split.ranks, split.pass, keys_of_all(spec, in, at), {}};
  Gates gates{own, {}};
  const auto sums = [&] {
    return gathered(split, log_gates(spec.decay, gates.clean).to(at::kDouble).sum(-1));
  };
  if (!is<NoDecay>(spec.decay)) {
    at::Tensor all = sums();  // of each rank: NaN tells all of them that there is such a gate
    if (in.q.is_cpu() && in.decay.defined() && all.isnan().any().item<bool>()) {
      const at::Tensor nan = in.decay.detach().isnan();
      const at::Tensor& begin = ring.seen.from.defined() ? ring.seen.from : ring.seen.lo;
      const at::Tensor last = at::arange(at.from, at.from + at.T, at::kLong).unsqueeze(0);
      gates.rows = exec::spoiled_rows(keys_up_to(split, nan, 2, 0),
                                      begin.to(at::kLong).unsqueeze(0), last, own);
      gates.clean.decay = in.decay.masked_fill(nan, 0);
      all = sums();
    }
    ring.decay_before = all.narrow(0, 0, split.rank).sum(0);
  }
  const auto attend_ring = in.q.is_cuda() ? exec::attend_round_on_gpu : exec::attend_round;
  return times(attend_ring(spec, gates.clean, ring), gates.rows);
}

}  // namespace

static void check_split(const Spec& spec, const Inputs& in) {
  if (const std::string reason = why_no_split(spec); !reason.empty())
    fail("cannot divide a sequence over several ranks: ", reason,
         "; choose a causal variant without dropout and bias");
  check(in.q.dim() == 4 && in.k.dim() == 4 && in.q.size(2) == in.k.size(2) &&
            !in.cu_seqlens_k.defined(),
        "a sequence over several ranks requires q and k of four axes, with as many queries as "
        "keys and without cu_seqlens_k");
}

at::Tensor attend_split(const Spec& spec, const Inputs& in, const Split& split,
                        std::string_view execution) {
  if (split.ranks == 1) return attend(spec, in, execution);
  check_split(spec, in);
  return attend_split(spec, in, split, travels(spec, in, execution), execution);
}

at::Tensor attend_split(const Spec& spec, const Inputs& in, const Split& split, Travels what,
                        std::string_view execution) {
  check_split(spec, in);
  if (what == Travels::states) return by_state(spec, in, split, execution);
  if (what == Travels::blocks_of_keys) return by_ring(spec, in, split);
  return by_keys(spec, in, split, execution);
}

}  // namespace horner::attn

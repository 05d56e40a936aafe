#include "attn/state.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "attn/exec/by_series.h"
#include "attn/exec/chunked.h"
#include "attn/exec/cpu.h"
#include "attn/exec/decode.h"
#include "attn/exec/decode_cuda.h"
#include "attn/exec/delta.h"
#include "attn/exec/delta_cuda.h"
#include "attn/exec/exec.h"
#include "attn/exec/near.h"
#include "attn/inputs.h"
#include "attn/spec_text.h"
#include "attn/stages.h"
#include "core/check.h"

namespace horner::attn {

at::Tensor attend_from(const Spec& spec, const Inputs& in, const Carry& before, Carry* after) {
  check_inputs(spec, in);
  const std::string reason = exec::why_no_stream(spec, in);
  check(reason.empty(), "cannot attend from a state: ", reason);
  check(!in.cu_seqlens.defined(), exec::kOneStream);
  return exec::attend_in_chunks(spec, in, exec::cut(spec, in), &before, after);
}

// Copies `x`, which may have fewer channels, to the tokens from `at` on.
static void put(at::Tensor& to, const at::Tensor& x, int64_t axis, int64_t at) {
  at::Tensor place = to.narrow(axis, at, x.size(axis));
  if (x.dim() == 4) place = place.narrow(3, 0, x.size(3));
  place.copy_(x);
}

static void put_keep(State& s, const Inputs& in, int64_t n) {
  if (in.keep.defined() && !s.recent.keep.defined())
    s.recent.keep = at::ones({s.shape.B, s.room}, in.keep.options());
  if (!s.recent.keep.defined()) return;
  at::Tensor place = s.recent.keep.narrow(1, s.held, n);
  in.keep.defined() ? place.copy_(in.keep) : place.fill_(true);
}

// Updates the counts and sums that every kind of state has.
static void add_counts(State& s, const Inputs& in) {
  const int64_t n = in.k.size(2);
  if (in.keep.defined())
    s.carry.count.add_(in.keep.sum(1));
  else
    s.carry.count.add_(double(n));
  if (s.carry.gates.defined()) {
    at::Tensor share = in.denominator_gate.to(at::kDouble).exp();
    if (in.keep.defined()) share = share.masked_fill(in.keep.logical_not().unsqueeze(1), 0);
    s.carry.gates.add_(share.sum(-1));
  }
  s.tokens += n;
}

static void put_decay(State& s, const at::Tensor& log_gates) {
  const at::Tensor before = s.decay_sums.narrow(2, 0, s.held);
  const bool of_keys = !s.finite && is<TokenGate>(s.spec.decay);
  put(s.decay_sums, exec::running_gates(log_gates, before, of_keys), 2, s.held);
}

// How many keys the newest query sees, of those that its mask shows: [B], or one number.
static at::Tensor seen_count(const State& s) {
  if (sees_all_past(s.spec.mask)) return s.carry.count;
  const int64_t shown = std::min(s.held, seen_by_newest(s));
  if (!s.recent.keep.defined()) return s.carry.count.clamp_max(shown);
  const int64_t first = std::min<int64_t>(shown, reach(s.spec.mask).first), last = shown - first;
  return s.recent.keep.narrow(1, 0, first).sum(1) +
         s.recent.keep.narrow(1, s.held - last, last).sum(1);
}

// How many of the recent keys are near for the newest query.
static int64_t near_held(const State& s) {
  return std::min(near_keys(s.spec), s.held);
}

// Those of them that it sees: [1 or B, 1, 1, 1].
static at::Tensor near_count(const State& s) {
  const int64_t near = near_held(s);
  if (!s.recent.keep.defined()) return at::scalar_tensor(near, wide(s.dtype)).view({1, 1, 1, 1});
  return s.recent.keep.narrow(1, s.held - near, near).sum(1).to(wide(s.dtype)).view({-1, 1, 1, 1});
}

// The result of the newest token, whose key is already among the recent ones.
static at::Tensor result(const State& s, const Inputs& in, const at::Tensor& q) {
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  const at::Tensor count = seen_count(s).view({-1, 1, 1, 1}).to(wide(s.dtype));
  const at::Tensor factor =  // in host memory where it is one number
      sharpness_from(s.spec.sharpness) == SharpnessFrom::count
          ? scale(s.spec, in, count)
          : at::scalar_tensor(scale_factor(s.spec, in), wide(s.dtype));
  at::Tensor centre;  // the kernel finds the mean score
  if (s.spec.less_log_count) centre = log_count(count, in).to(sums_dtype(s)).contiguous();
  Sums sums = exec::apply_state(s, in, q, factor, centre);
  if (near_held(s) > 0) sums.far = count - near_count(s);
  sums.count = count;
  if (s.carry.gates.defined())
    sums.gates = s.carry.gates.repeat_interleave(repeats, 1)
                     .view({s.shape.B, -1, 1, 1})
                     .to(count.scalar_type());
  return finish(s.spec, in, sums);
}

// Folds the recent keys that are not near.
static void fold_far(State& s) {
  const int64_t far = s.held - near_held(s);
  if (far == 0) return;
  exec::fold(s, far);
  if (s.decay_sums.defined()) s.carry.decay.add_(s.decay_sums.select(2, far - 1));
}

// Makes room for other tokens: only those with near keys stay, at the front.
static void keep_near(State& s) {
  fold_far(s);
  const int64_t near = near_held(s), far = s.held - near;
  const auto move = [&](at::Tensor& x, int64_t axis) {
    if (x.defined()) x.narrow(axis, 0, near).copy_(x.narrow(axis, far, near).clone());
  };
  if (near > 0 && far > 0) {
    if (s.decay_sums.defined()) s.decay_sums.sub_(s.decay_sums.narrow(2, far - 1, 1).clone());
    move(s.recent.k, 2), move(s.recent.v, 2), move(s.given_k, 2), move(s.decay_sums, 2);
    move(s.recent.keep, 1);
  }
  s.held = near;
}

static void put_keys(State& s, const Inputs& in, const at::Tensor& mapped_k, const at::Tensor& v) {
  put(s.recent.v, v, 2, s.held);
  put(s.recent.k, mapped_k, 2, s.held);
  if (s.given_k.defined()) put(s.given_k, in.k, 2, s.held);
  put_keep(s, in, in.k.size(2));
}

// Near keys are in `carry`, where chunks read them, or among the recent ones, where a single token
// does.
static void near_to_recent(State& s, const Inputs& in) {
  Carry& c = s.carry;
  const int64_t n = near_keys(s.spec), held = std::min(n, s.tokens);
  const auto last = [&](const at::Tensor& x, int64_t axis) {
    return x.narrow(axis, n - held, held);
  };
  Inputs keys{.k = last(c.near_k, 2), .keep = last(c.near_keep, 1)};
  if (keys.keep.all().item<bool>()) keys.keep = at::Tensor();
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  put_keys(s, keys, mapped(s.spec.features, keys.k, in.key_projection, repeats), last(c.near_v, 2));
  if (c.near_decay.defined()) {
    put_decay(s, last(c.near_decay, 2));
    c.decay.sub_(c.near_decay.sum(2));
  }
  s.held = held;
  for (at::Tensor* x : {&c.near_k, &c.near_v, &c.near_keep, &c.near_decay}) *x = at::Tensor();
}
static void near_to_carry(State& s) {
  Carry& c = s.carry;
  const int64_t n = near_keys(s.spec), near = near_held(s), far = s.held - near;
  const auto last = [&](const at::Tensor& x, int64_t channels, at::ScalarType t) {
    return at::constant_pad_nd(x.narrow(2, far, near).narrow(3, 0, channels).to(t),
                               {0, 0, n - near, 0});
  };
  const at::Tensor& k = s.given_k.defined() ? s.given_k : s.recent.k;
  c.near_k = last(k, s.shape.D, s.dtype), c.near_v = last(s.recent.v, s.shape.E, wide(s.dtype));
  const at::Tensor keep = s.recent.keep.defined()
                              ? s.recent.keep.narrow(1, far, near)
                              : at::ones({s.shape.B, near}, c.count.options().dtype(at::kBool));
  c.near_keep = at::constant_pad_nd(keep, {n - near, 0});
  if (!s.decay_sums.defined()) return;
  const at::Tensor sums = at::constant_pad_nd(s.decay_sums.narrow(2, 0, s.held), {1, 0});
  const at::Tensor logs = sums.narrow(2, far + 1, near) - sums.narrow(2, far, near);
  c.near_decay = at::constant_pad_nd(logs, {n - near, 0});
  c.decay.add_(logs.sum(2));
}

void flush(State& s) {
  if (!s.finite || s.held == 0) return;
  fold_far(s);
  if (near_keys(s.spec) > 0) near_to_carry(s);
  s.held = 0;
}

// The value of one token less what the tokens before it give for its key k (Delta).
static at::Tensor corrected(const State& s, const Inputs& in, at::Tensor k, const at::Tensor& v) {
  k = k.to(sums_dtype(s));
  const at::Tensor factor = at::scalar_tensor(scale_factor(s.spec, in), k.scalar_type());
  at::Tensor given = exec::apply_state(s, in, k, factor, {}).N;
  if (s.decay_sums.defined())
    given = given * log_gates(s.spec.decay, in).to(at::kDouble).exp().unsqueeze(-1);
  const at::Tensor share = key_shares(s.spec, in, k).unsqueeze(-1);
  return (share * (v - given)).masked_fill(share == 0, 0);
}

// Decays the channels of the sums by the gates of one token.
static void decay_channels(State& s, const Inputs& in) {
  const at::Tensor logs = channel_logs(in).squeeze(2), gates = logs.exp();
  s.carry.S.mul_(gates.unsqueeze(-1)), s.carry.z.mul_(gates), s.carry.decay.add_(logs);
}

// Adds the keys that became far with the last n tokens to the sum of far keys. Without near keys
// these are the last n.
static void add_far_keys(State& s, int64_t n) {
  const int64_t to = s.held - near_held(s), from = std::max<int64_t>(0, to - n);
  if (to == from) return;
  at::Tensor k = s.recent.k.narrow(2, from, to - from).narrow(3, 0, key_channels(s));
  if (s.recent.keep.defined()) {
    const at::Tensor keep = s.recent.keep.narrow(1, from, to - from);
    k = k.masked_fill(keep.logical_not().view({-1, 1, to - from, 1}), 0);
  }
  s.carry.keys.add_(to - from == 1 ? k.select(2, 0) : k.sum(2, false, at::kDouble));
}

// Adds the keys and values of n tokens to the buffer; with Delta or gates of channels, of one.
static void add_to_buffer(State& s, const Inputs& in) {
  const Spec& spec = s.spec;
  if (is<ChannelGate>(spec.decay)) decay_channels(s, in);
  const int64_t n = in.k.size(2);
  const at::Tensor k = mapped(spec.features, in.k, in.key_projection, in.q.size(1) / in.k.size(1));
  const at::Tensor gates = value_gates(spec, in, s.carry.count);
  const at::Tensor v = gates.defined() ? in.v * gates.unsqueeze(-1) : in.v;
  put_keys(s, in, k, is<Delta>(spec.values) ? corrected(s, in, k, v) : v);
  if (s.decay_sums.defined()) put_decay(s, log_gates(spec.decay, in));
  add_counts(s, in);
  s.held += n;
  if (spec.centred) add_far_keys(s, n);
}

static at::Tensor step_sums(State& s, const Inputs& in) {
  if (s.carry.near_k.defined()) near_to_recent(s, in);
  add_to_buffer(s, in);
  const at::Tensor o = result(s, in, mapped(s.spec.features, in.q, in.query_projection));
  if (s.held == s.room || is<ChannelGate>(s.spec.decay))
    keep_near(s);  // channels decay in the sums
  return o;
}

// Many tokens or one, on a GPU, with the delta rule or gates of channels: no token waits.
static at::Tensor step_linear(State& s, const Inputs& in) {
  const at::Tensor seen = s.carry.count.clone();  // before these tokens
  Sums sums = exec::step_linear(s.spec, in, s.carry);
  add_counts(s, in);
  const at::Tensor kept = in.keep.defined() ? in.keep.to(at::kDouble).cumsum(1)
                                            : at::arange(1, in.k.size(2) + 1, seen.options());
  sums.count = (seen.unsqueeze(1) + kept).view({s.shape.B, 1, -1, 1}).to(wide(s.dtype));
  return finish(s.spec, in, sums);
}

// Many tokens after those of the sums, which become the sums after them: in linear time.
static at::Tensor step_chunks(State& s, const Inputs& in) {
  flush(s);
  s.tokens += in.q.size(2);
  if (in.q.is_cpu())
    return exec::attend_in_chunks(s.spec, in, exec::cut(s.spec, in), &s.carry, &s.carry, true);
  Carry after = s.carry;
  const at::Tensor o = exec::attend_by_series(s.spec, in, s.carry, after);
  s.carry = after;
  s.carry.count = after.count.contiguous();
  return o;
}

// Prefill of an empty state on a GPU: attends to the whole prompt and folds it into the sums.
static at::Tensor prefill(State& s, const Inputs& in) {
  State all = s;  // shares the sums, with room for the prompt
  all.room = in.k.size(2);
  for (at::Tensor* x : {&all.recent.k, &all.recent.v, &all.decay_sums}) {
    if (!x->defined()) continue;
    std::vector<int64_t> shape = x->sizes().vec();
    shape[2] = all.room;
    *x = at::zeros(shape, x->options());
  }
  all.recent.keep = at::Tensor();
  add_to_buffer(all, in);
  flush(all);
  s.tokens = all.tokens;
  return attend(s.spec, in);
}

// Makes room for n more tokens in a KV cache and drops the keys that no later query sees: those
// before the interval of the newest query, but for the first keys of a streaming mask. What is left
// is a stream of its own under that mask.
static void make_room(State& s, const Inputs& in, int64_t n) {
  const int64_t kept = std::min(s.held, seen_by_newest(s));
  const int64_t first = std::min<int64_t>(kept, reach(s.spec.mask).first), last = kept - first;
  if (s.held + n <= s.room) return;
  const int64_t room = std::max<int64_t>(2 * (kept + n), 64);
  const auto grown = [&](at::Tensor& x, int64_t axis, std::vector<int64_t> shape,
                         at::ScalarType t) {
    shape[size_t(axis)] = room;
    const at::Tensor fresh = at::zeros(shape, s.carry.count.options().dtype(t));
    if (x.defined()) {
      fresh.narrow(axis, 0, first).copy_(x.narrow(axis, 0, first));
      fresh.narrow(axis, first, last).copy_(x.narrow(axis, s.held - last, last));
    }
    x = fresh;
  };
  for (const Input& i : input_table()) {
    const int64_t axis = axis_of(i, "S");
    const at::Tensor& from = in.*i.at;
    if (axis < 0 || i.role == Role::mask || !from.defined()) continue;
    std::vector<int64_t> shape = from.sizes().vec();
    if (shape.size() == 4) shape[3] = padded_size(shape[3]);
    const bool is_kept = i.at == &Inputs::k || i.at == &Inputs::v;
    grown(s.recent.*i.at, axis, shape, is_kept ? s.kept : wide(from.scalar_type()));
  }
  if (s.recent.keep.defined()) grown(s.recent.keep, 1, {s.shape.B, 0}, at::kBool);
  if (const at::Tensor g = log_gates(s.spec.decay, in); g.defined())
    grown(s.decay_sums, 2, g.sizes().vec(), at::kDouble);
  s.held = kept, s.room = room;
}

// Whether the decode kernel runs this variant over a KV cache. Its gates are of all keys.
static bool has_kernel(const State& s, const Spec& spec) {
  const bool whole = sees_all_past(spec.mask) || !s.carry.gates.defined();
  const bool cpu = s.carry.count.is_cpu();
  const bool here = cpu || (s.dtype != at::kDouble && exec::why_not_on_gpu(s.shape).empty());
  const exec::Has has{
      .softcap = cpu, .sink = true, .near = cpu, .near_share = cpu, .first_keys = cpu};
  return !needs_the_row(spec) && whole && is<Identity>(spec.features) && here &&
         (!spec.centred || s.carry.keys.defined()) && exec::why_lacking(spec, has).empty();
}

// Appends the keys and values of n tokens to a KV cache.
static void append(State& s, const Inputs& in, int64_t n) {
  make_room(s, in, n);
  for (const Input& i : input_table()) {
    const int64_t axis = axis_of(i, "S");
    if (axis >= 0 && i.role != Role::mask && (in.*i.at).defined())
      put(s.recent.*i.at, in.*i.at, axis, s.held);
  }
  put_keep(s, in, n);
  if (const at::Tensor g = log_gates(s.spec.decay, in); g.defined()) put_decay(s, g);
  s.held += n;
  if (s.carry.keys.defined()) add_far_keys(s, n);
}

// The newest inputs with all keys of the cache.
static Inputs with_cached(const State& s, const Inputs& in) {
  Inputs all = in;
  for (const Input& i : input_table()) {
    const int64_t axis = axis_of(i, "S");
    if (axis < 0 || !(s.recent.*i.at).defined()) continue;
    at::Tensor x = (s.recent.*i.at).narrow(axis, 0, s.held);
    if (x.dim() == 4) x = x.narrow(3, 0, (in.*i.at).size(3));
    all.*i.at = i.role == Role::mask ? x : x.to((in.*i.at).scalar_type());
  }
  all.v = all.v.to(in.q.scalar_type());
  return all;
}

// Values of the delta rule are corrected once, when they come: a later token finds them so.
static at::Tensor step_keys(State& s, const Inputs& given) {
  auto [spec, in] = with_value_gates(s.spec, given, s.carry.count);
  const int64_t n = in.q.size(2);
  const bool corrects = caches_corrected(spec);
  if (corrects) {
    const at::Tensor gates = value_gates(spec, in, s.carry.count);
    if (gates.defined()) in.v = in.v * gates.unsqueeze(-1);
    in.beta = in.input_gate = at::Tensor();
  }
  append(s, in, n);
  add_counts(s, in);
  if (corrects) {
    Inputs keys = with_cached(s, in);
    keys.beta = given.beta;
    exec::correct_values(spec, keys, s.held - n,
                         s.recent.v.narrow(2, 0, s.held).narrow(3, 0, s.shape.E));
    spec.values = AsGiven{}, spec.input_gate = false;
  }
  if (n == 1 && has_kernel(s, spec)) return result(s, in, in.q);
  return attend(spec, with_cached(s, in));
}

// `recent.keep` is defined from the first hidden key on: whether keys have been seen is then known
// without reading a count from a GPU.
static at::Tensor step_finite(State& s, const Inputs& given) {
  if (given.keep.defined() && !s.recent.keep.defined())
    s.recent.keep = at::ones({s.shape.B, s.room}, given.keep.options());
  const bool first = s.tokens == 0 || s.recent.keep.defined();
  const Inputs in = first ? exec::after_first_keys(given, s.carry) : given;
  const int64_t n = in.q.size(2);
  if (in.q.is_cuda() && exec::has_other_sums(s.spec)) return step_linear(s, in);
  constexpr int64_t kPrefill = 16;  // from this length on, chunks are faster than single tokens
  const bool many = n >= kPrefill;
  if (many && in.q.is_cuda() && s.tokens == 0) return prefill(s, in);
  const bool in_chunks = in.q.is_cpu() || exec::why_no_series(s.spec).empty();
  if (many && in_chunks && !exec::has_nan_gates(in)) return step_chunks(s, in);
  if (n == 1) return step_sums(s, in);
  std::vector<at::Tensor> results;
  for (int64_t t = 0; t < n; ++t) results.push_back(step_finite(s, tokens(in, t, t + 1)));
  return at::cat(results, 2);
}

at::Tensor step(State& s, const Inputs& in) {
  const c10::NoGradGuard without_gradients;
  check_inputs(s.spec, in);
  const auto [B, G, D, E] = s.shape;
  check(in.k.size(0) == B && in.k.size(1) == G && in.k.size(3) == D && in.v.size(3) == E,
        "this state was made for B = ", B, ", G = ", G, ", D = ", D, ", E = ", E, "; k is ",
        in.k.sizes(), ", v ", in.v.sizes());
  check(in.q.size(2) == in.k.size(2), "a step requires as many queries as keys, not ", in.q.size(2),
        " and ", in.k.size(2));
  check(!in.cu_seqlens.defined(), exec::kOneStream);
  check(in.q.scalar_type() == s.dtype, "this state was made for ", dtype_name(s.dtype),
        " inputs, not ", dtype_name(in.q.scalar_type()));
  const at::Device device = s.carry.count.device();
  check(in.q.device() == device, "this state is on ", device.str(), ", q on ", in.q.device().str());
  if (in.q.size(2) == 0) return exec::without_keys(in, nullptr);
  return s.finite ? step_finite(s, in) : step_keys(s, in);
}

// The first n keys of the KV cache of `later` as inputs.
static Inputs held_keys(const State& later, int64_t n) {
  Inputs keys;
  for (const Input& i : input_table()) {
    const at::Tensor& x = later.recent.*i.at;
    if (x.defined()) keys.*i.at = x.narrow(axis_of(i, "S"), 0, n);
  }
  if (is<HeadSlope>(later.spec.decay) && later.held > 0) {  // equal steps between the sums
    // Of the longest stream: shorter ones of a batch begin with places without a key.
    const at::Tensor sums =
        later.shape.B > 0 ? later.decay_sums.select(0, later.carry.count.argmax().item<int64_t>())
                          : later.decay_sums.new_zeros({later.shape.G, later.held});
    const at::Tensor last = sums.select(1, later.held - 1);
    keys.slope = later.held > 1 ? sums.select(1, later.held - 2) - last : -last;
  }
  return keys;
}

void reserve(State& s, int64_t n) {
  if (!s.finite && s.held > 0) make_room(s, held_keys(s, 0), n);
}

void merge(State& state, const State& later) {
  check_alike("merge", state, later);
  check(!is<Delta>(state.spec.values),
        "cannot merge states of the delta rule: later values depend on the sums before them");
  const bool near = state.finite && !is<NoKeys>(state.spec.near);
  if (near) {
    const std::string reason = exec::why_not_followed(state.spec);
    check(reason.empty(), "cannot merge states of this variant: ", reason);
  }
  check(is<AsGiven>(state.spec.values),
        "cannot merge states of a variant that divides values by a power of their position");
  const StateShape &a = state.shape, &b = later.shape;
  check(a.B == b.B && a.G == b.G && a.D == b.D && a.E == b.E,
        "cannot merge states of two shapes: k is [", a.B, ", ", a.G, ", T, ", a.D, "] and [", b.B,
        ", ", b.G, ", T, ", b.D, "], v [.., ", a.E, "] and [.., ", b.E, "]");
  const int chunk = reach(state.spec.mask).chunk;
  check(chunk == 0 || state.tokens % chunk == 0, "cannot merge states of chunks of ", chunk,
        " tokens after ", state.tokens, " tokens: the chunks of `later` begin elsewhere");
  if (later.tokens == 0) return;
  if (!state.finite) {
    append(state, held_keys(later, later.held), later.held);
  } else {
    // A state with hidden keys has a mask from its first token on: see step_finite.
    if (later.recent.keep.defined() && !state.recent.keep.defined())
      state.recent.keep = at::ones({a.B, state.room}, later.recent.keep.options());
    State copy = later;
    for (at::Tensor* x : {&copy.carry.S, &copy.carry.z, &copy.carry.decay})
      if (x->defined()) *x = x->clone();
    flush(state), flush(copy);
    if (near) exec::follow_near(state.spec, state.carry, copy.carry, later.tokens);
    if (copy.carry.decay.defined()) {
      at::Tensor since = copy.carry.decay;  // of the gates that the later sums have
      if (near) since = since - copy.carry.near_decay.sum(-1);
      const at::Tensor left = since.exp().to(state.carry.S.scalar_type());
      // Of all sums, or of each channel; a NaN before the first key that is seen spoils nothing.
      const at::Tensor none = state.carry.count.view({-1, 1, 1}) == 0;
      const at::Tensor each = left.view({a.B, a.G, -1}).masked_fill(none, 0);
      state.carry.S.mul_(each.unsqueeze(-1)), state.carry.z.mul_(each);
      state.carry.decay.add_(copy.carry.decay);
    }
    state.carry.S.add_(copy.carry.S), state.carry.z.add_(copy.carry.z);
    if (state.carry.keys.defined()) state.carry.keys.add_(copy.carry.keys);
  }
  state.carry.count.add_(later.carry.count);
  if (state.carry.gates.defined()) state.carry.gates.add_(later.carry.gates);
  state.tokens += later.tokens;
}

void repeat(State& s, int64_t tokens) {
  for (int64_t n; (n = std::min(s.tokens, tokens - s.tokens)) > 0; s.tokens += n) {
    if (!s.finite) append(s, held_keys(s, std::min(n, s.held)), std::min(n, s.held));
    s.carry.count.add_(double(n));
  }
}

}  // namespace horner::attn

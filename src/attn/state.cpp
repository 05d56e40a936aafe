#include "attn/state.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "attn/exec/chunked.h"
#include "attn/exec/cpu.h"
#include "attn/exec/decode_cuda.h"
#include "attn/exec/isa.h"
#include "attn/inputs.h"
#include "attn/parallel.h"
#include "attn/spec_text.h"
#include "attn/stages.h"
#include "core/check.h"

namespace horner::attn {

using exec::pointer;
using kernels::Decode;

static int64_t padded_size(int64_t n) {
  return (n + kernels::kPad - 1) / kernels::kPad * kernels::kPad;
}

// Which axis of an input counts keys; -1 for none.
static int64_t key_axis(const Input& i) {
  const size_t at = std::string_view(i.shape).find('S');
  return at == std::string_view::npos ? -1 : int64_t(at);
}

static at::ScalarType sums_dtype(const State& s) {
  return s.finite ? exec::sums_dtype(s.spec, s.dtype) : wide(s.dtype);
}

static int64_t key_channels(const State& s) {
  return s.finite ? mapped_channels(s.spec, s.shape.D) : s.shape.D;
}

State make_state(const Spec& spec, const StateShape& shape, at::ScalarType dtype, int64_t buffer,
                 at::Device device) {
  check(!is<Full>(spec.mask), "a full mask sees the tokens to come: a stream has none of them yet");
  check(buffer >= 0, "a state keeps 0 tokens waiting or more, not ", buffer);
  const bool held_there = device.is_cpu() || (exec::sums_dtype(spec, dtype) == at::kFloat &&
                                              exec::why_not_on_gpu(shape).empty());
  State s{spec, shape, dtype, buffer > 0 && why_no_state(spec).empty() && held_there};
  s.room = s.finite ? buffer : 0;
  const auto exact = at::TensorOptions(at::kDouble).device(device);
  s.carry.count = at::zeros({shape.B}, exact);
  if (is<CumulativeGate>(spec.denominator)) s.carry.gates = at::zeros({shape.B, shape.G}, exact);
  if (!s.finite) return s;
  const std::string reason = why_too_large(spec, shape);
  check(reason.empty(), reason);
  const auto F = int64_t(feature_count(spec, shape.D)), D = key_channels(s);
  const auto options = exact.dtype(sums_dtype(s));
  s.carry.S = at::zeros({shape.B, shape.G, F, padded_size(shape.E)}, options);
  s.carry.z = at::zeros({shape.B, shape.G, F}, options);
  if (spec.centred) s.carry.keys = at::zeros({shape.B, shape.G, D}, exact);
  if (is<TokenGate>(spec.decay)) {
    s.carry.decay = at::zeros({shape.B, shape.G}, exact);
    s.fades = at::zeros({shape.B, shape.G, buffer}, exact);
  }
  s.recent.k = at::zeros({shape.B, shape.G, buffer, padded_size(D)}, options);
  s.recent.v = at::zeros({shape.B, shape.G, buffer, padded_size(shape.E)}, options);
  return s;
}

// Copies `x`, of fewer channels perhaps, to the tokens from `at` on.
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

// Counts and sums that every kind of state has.
static void add_counts(State& s, const Inputs& in) {
  const int64_t n = in.k.size(2);
  if (in.keep.defined())
    s.carry.count.add_(in.keep.sum(1));
  else
    s.carry.count.add_(double(n));
  if (s.carry.gates.defined()) {
    at::Tensor share = in.denominator_gate.to(at::kDouble).exp();
    if (in.keep.defined()) share = share * in.keep.unsqueeze(1);
    s.carry.gates.add_(share.sum(-1));
  }
  s.tokens += n;
}

static void put_fades(State& s, const at::Tensor& log_gates) {
  at::Tensor sums = log_gates.to(at::kDouble).cumsum(-1);
  if (s.held > 0) sums = sums + s.fades.narrow(2, s.held - 1, 1);
  put(s.fades, sums, 2, s.held);
}

template <class R>
struct DecodeWeight {
  using Any = decltype(Decode<R>::weight);
  Any operator()(Exp w) const { return w; }
  Any operator()(Sigmoid w) const { return w; }
  Any operator()(Taylor w) const { return polynomial<R>(0, w.order); }
  Any operator()(Power w) const { return polynomial<R>(w.degree, w.degree); }
  template <class W>
  Any operator()(W) const {
    fail("no weight of one score");
  }
};

template <class R>
static const kernels::DecodeKernels<R>& kernels_for() {
  if constexpr (std::is_same_v<R, float>)
    return *exec::isa().states.decode_float;
  else
    return *exec::isa().states.decode_double;
}

template <class R>
static Decode<R> problem(const State& s) {
  Decode<R> c{};
  c.B = s.shape.B, c.G = s.shape.G, c.D = key_channels(s);
  c.width = s.recent.k.size(3), c.E = s.recent.v.size(3);
  c.weight = std::visit(DecodeWeight<R>{}, s.spec.weight);
  c.clamp = R(s.spec.clamp);
  c.k = pointer<R>(s.recent.k), c.v = pointer<R>(s.recent.v);
  c.decay = pointer<double>(s.fades);
  c.keep = reinterpret_cast<const uint8_t*>(pointer<bool>(s.recent.keep));
  c.room = s.room, c.to = s.held;
  if (!s.finite) return c;
  c.S = pointer<R>(s.carry.S), c.z = pointer<R>(s.carry.z), c.F = s.carry.z.size(2);
  const Orders o = orders(s.spec.weight);
  c.first = o.first, c.last = o.last;
  return c;
}

enum class Task { ask, fold };  // the kernels' two
// Shared by the threads where it is worth waking them.
template <class R>
static void run(const State& s, const Decode<R>& c, Task which) {
  if constexpr (std::is_same_v<R, float>)
    if (s.carry.count.is_cuda())
      return which == Task::ask ? exec::ask_on_gpu(c, s.carry.count)
                                : exec::fold_on_gpu(c, s.carry.count);
  const auto task = which == Task::ask ? kernels_for<R>().forward : kernels_for<R>().fold;
  constexpr int64_t kWorth = 1 << 18;  // numbers to read
  const int64_t heads = c.B * c.G, each = c.F * c.E + (c.to - c.from) * (c.width + c.E);
  for_each_task<R>(
      heads, kernels_for<R>().scratch(c), [&](int64_t i, R* own) { task(c, i, own); },
      heads * each >= kWorth ? heads : 1);
}

// N, W and shift of one query a head.
template <class R>
static Sums ask(const State& s, const at::Tensor& q, const at::Tensor& factor,
                const at::Tensor& centre) {
  const auto dtype = sums_dtype(s);
  const bool one_scale = factor.dim() == 0;
  const at::Tensor rows = exec::padded(one_scale ? q : q * factor, dtype);
  const int64_t B = q.size(0), H = q.size(1);
  Decode<R> c = problem<R>(s);
  c.H = H;
  c.scale = one_scale ? factor.item<R>() : R(1);
  const at::Tensor N = at::empty({B, H, 1, c.E}, rows.options());
  const at::Tensor W = at::empty({B, H, 1, 1}, rows.options()), shift = at::empty_like(W);
  const at::Tensor gate = s.recent.input_gate;
  c.q = pointer<R>(rows), c.centre = pointer<R>(centre), c.gate = pointer<R>(gate);
  if (const auto* w = std::get_if<Window>(&s.spec.mask))
    c.from = std::max<int64_t>(0, s.held - w->size);
  c.N = pointer<R>(N), c.W = pointer<R>(W), c.shift = pointer<R>(shift);
  run(s, c, Task::ask);
  return {N.narrow(-1, 0, s.shape.E), W, shift, {}, {}};
}
static Sums ask(const State& s, const at::Tensor& q, const at::Tensor& factor,
                const at::Tensor& centre) {
  return sums_dtype(s) == at::kDouble ? ask<double>(s, q, factor, centre)
                                      : ask<float>(s, q, factor, centre);
}

// The result of one token, whose key lies among the recent ones already.
static at::Tensor result(const State& s, const Inputs& in, const at::Tensor& q) {
  const int64_t repeats = in.q.size(1) / in.k.size(1);
  at::Tensor count = s.carry.count.view({-1, 1, 1, 1}).to(wide(s.dtype));
  if (const auto* w = std::get_if<Window>(&s.spec.mask)) count = count.clamp_max(w->size);
  const at::Tensor factor =  // of the host's memory where it is one number
      is<Flat>(s.spec.sharpness) ? at::scalar_tensor(scale_factor(s.spec, in), wide(s.dtype))
                                 : scale(s.spec, in, count);
  at::Tensor centre;
  if (s.spec.centred) {
    const at::Tensor mean =
        s.carry.keys.unsqueeze(2) / s.carry.count.clamp_min(1).view({-1, 1, 1, 1});
    centre =
        (q * factor * mean.repeat_interleave(repeats, 1)).sum(-1).to(sums_dtype(s)).contiguous();
  }
  Sums sums = ask(s, q, factor, centre);
  sums.count = count;
  if (s.carry.gates.defined())
    sums.gates = s.carry.gates.repeat_interleave(repeats, 1)
                     .view({s.shape.B, -1, 1, 1})
                     .to(count.scalar_type());
  return finish(s.spec, in, sums);
}

template <class R>
static void fold(const State& s) {
  Decode<R> c = problem<R>(s);
  c.H = c.G;  // there is no query
  run(s, c, Task::fold);
}

void flush(State& s) {
  if (!s.finite || s.held == 0) return;
  sums_dtype(s) == at::kDouble ? fold<double>(s) : fold<float>(s);
  if (s.fades.defined()) s.carry.decay.add_(s.fades.select(2, s.held - 1));
  s.held = 0;
}

// Puts the keys' side of n tokens where tokens wait.
static void take_in(State& s, const Inputs& in) {
  const Spec& spec = s.spec;
  const int64_t n = in.k.size(2);
  const at::Tensor k = mapped(spec.features, in.k, in.key_projection, in.q.size(1) / in.k.size(1));
  put(s.recent.k, k, 2, s.held);
  put(s.recent.v, spec.input_gate ? in.v * in.input_gate.unsqueeze(-1) : in.v, 2, s.held);
  put_keep(s, in, n);
  if (s.fades.defined()) put_fades(s, in.decay);
  add_counts(s, in);
  if (spec.centred) {
    const at::Tensor seen = in.keep.defined() ? k * in.keep.view({-1, 1, n, 1}) : k;
    s.carry.keys.add_(n == 1 ? seen.select(2, 0) : seen.to(at::kDouble).sum(2));
  }
  s.held += n;
}

static at::Tensor step_sums(State& s, const Inputs& in) {
  take_in(s, in);
  const at::Tensor o = result(s, in, mapped(s.spec.features, in.q, in.query_projection));
  if (s.held == s.room) flush(s);
  return o;
}

// A prompt from the beginning, on a GPU: attended to as a whole, then folded into the sums at once.
static at::Tensor step_prompt(State& s, const Inputs& in) {
  State all = s;  // the same sums, and room for the prompt
  all.room = in.k.size(2);
  for (at::Tensor* x : {&all.recent.k, &all.recent.v, &all.fades}) {
    if (!x->defined()) continue;
    std::vector<int64_t> shape = x->sizes().vec();
    shape[2] = all.room;
    *x = at::zeros(shape, x->options());
  }
  all.recent.keep = at::Tensor();
  take_in(all, in);
  flush(all);
  s.tokens = all.tokens;
  return attend(s.spec, in);
}

// All keys and values: room for n more, what no window can see any more dropped.
static void make_room(State& s, const Inputs& in, int64_t n) {
  const auto* window = std::get_if<Window>(&s.spec.mask);
  const int64_t kept = window ? std::min<int64_t>(s.held, window->size) : s.held;
  if (s.held + n <= s.room) return;
  const int64_t room = std::max<int64_t>(2 * (kept + n), 64);
  const auto grown = [&](at::Tensor& x, int64_t axis, std::vector<int64_t> shape,
                         at::ScalarType t) {
    shape[size_t(axis)] = room;
    const at::Tensor fresh = at::zeros(shape, s.carry.count.options().dtype(t));
    if (x.defined()) fresh.narrow(axis, 0, kept).copy_(x.narrow(axis, s.held - kept, kept));
    x = fresh;
  };
  for (const Input& i : input_table()) {
    const int64_t axis = key_axis(i);
    const at::Tensor& from = in.*i.at;
    at::Tensor& x = s.recent.*i.at;
    if (axis < 0 || i.role == Role::mask || !from.defined()) continue;
    std::vector<int64_t> shape = from.sizes().vec();
    if (shape.size() == 4) shape[3] = padded_size(shape[3]);
    grown(x, axis, shape, wide(from.scalar_type()));
  }
  if (s.recent.keep.defined()) grown(s.recent.keep, 1, {s.shape.B, 0}, at::kBool);
  if (in.decay.defined()) grown(s.fades, 2, in.decay.sizes().vec(), at::kDouble);
  s.held = kept, s.room = room;
}

// Whether the kernel for one query can take all keys of this variant.
static bool has_kernel(const State& s) {
  const Spec& spec = s.spec;
  const bool pointwise = is<Exp>(spec.weight) || is<Sigmoid>(spec.weight) ||
                         is<Taylor>(spec.weight) || is<Power>(spec.weight);
  const bool whole =
      is<Causal>(spec.mask) || (!s.recent.keep.defined() && !is<CumulativeGate>(spec.denominator));
  const bool here =
      s.carry.count.is_cpu() || (s.dtype != at::kDouble && exec::why_not_on_gpu(s.shape).empty());
  return pointwise && whole && is<Identity>(spec.features) && !spec.centred &&
         !is<Adaptive>(spec.sharpness) && here;
}

// The keys' side of n tokens, after those that are there.
static void append(State& s, const Inputs& in, int64_t n) {
  make_room(s, in, n);
  for (const Input& i : input_table()) {
    const int64_t axis = key_axis(i);
    if (axis >= 0 && i.role != Role::mask && (in.*i.at).defined())
      put(s.recent.*i.at, in.*i.at, axis, s.held);
  }
  put_keep(s, in, n);
  if (in.decay.defined()) put_fades(s, in.decay);
  s.held += n;
}

static at::Tensor step_keys(State& s, const Inputs& in) {
  const int64_t n = in.q.size(2);
  append(s, in, n);
  add_counts(s, in);
  if (n == 1 && has_kernel(s)) return result(s, in, in.q);
  Inputs all = in;
  for (const Input& i : input_table()) {
    const int64_t axis = key_axis(i);
    if (axis < 0 || !(s.recent.*i.at).defined()) continue;
    at::Tensor x = (s.recent.*i.at).narrow(axis, 0, s.held);
    if (x.dim() == 4) x = x.narrow(3, 0, (in.*i.at).size(3));
    all.*i.at = i.role == Role::mask ? x : x.to((in.*i.at).scalar_type());
  }
  return attend(s.spec, all);
}

at::Tensor step(State& s, const Inputs& in) {
  const c10::NoGradGuard without_gradients;
  check_inputs(s.spec, in);
  const auto [B, G, D, E] = s.shape;
  check(in.k.size(0) == B && in.k.size(1) == G && in.k.size(3) == D && in.v.size(3) == E,
        "this state is of B = ", B, ", G = ", G, ", D = ", D, ", E = ", E, "; k is ", in.k.sizes(),
        ", v ", in.v.sizes());
  check(in.q.size(2) == in.k.size(2), "a step takes as many queries as keys: there are ",
        in.q.size(2), " and ", in.k.size(2));
  check(!in.cu_seqlens.defined(), "a state is of one stream: it takes no packed sequences");
  check(in.q.scalar_type() == s.dtype, "this state is of ", dtype_name(s.dtype), " inputs, not ",
        dtype_name(in.q.scalar_type()));
  const at::Device device = s.carry.count.device();
  check(in.q.device() == device, "this state is on ", device.str(), ", q on ", in.q.device().str());
  if (!s.finite) return step_keys(s, in);
  constexpr int64_t kPrompt = 16;  // from here on, chunks are faster than one token after the other
  const bool prompt = in.q.size(2) >= kPrompt;
  if (prompt && in.q.is_cuda() && s.tokens == 0) return step_prompt(s, in);
  if (prompt && in.q.is_cpu()) {
    flush(s);
    s.tokens += in.q.size(2);
    return exec::attend_in_chunks(s.spec, in, exec::cut(s.spec, in), &s.carry, &s.carry, true);
  }
  std::vector<at::Tensor> results;
  for (int64_t t = 0; t < in.q.size(2); ++t) results.push_back(step_sums(s, tokens(in, t, t + 1)));
  return results.size() == 1 ? results[0] : at::cat(results, 2);
}

// What `later` holds, as inputs.
static Inputs held_keys(const State& later) {
  Inputs keys;
  for (const Input& i : input_table()) {
    const at::Tensor& x = later.recent.*i.at;
    if (x.defined()) keys.*i.at = x.narrow(key_axis(i), 0, later.held);
  }
  return keys;
}

void merge(State& state, const State& later) {
  check(text(state.spec) == text(later.spec) && state.dtype == later.dtype,
        "states of two variants do not merge: '", text(state.spec), "' and '", text(later.spec),
        "'");
  const StateShape &a = state.shape, &b = later.shape;
  check(a.B == b.B && a.G == b.G && a.D == b.D && a.E == b.E,
        "states of two shapes do not merge: k is [", a.B, ", ", a.G, ", T, ", a.D, "] and [", b.B,
        ", ", b.G, ", T, ", b.D, "]");
  if (!state.finite) {
    append(state, held_keys(later), later.held);
  } else {
    State copy = later;
    for (at::Tensor* x : {&copy.carry.S, &copy.carry.z, &copy.carry.decay})
      if (x->defined()) *x = x->clone();
    flush(state), flush(copy);
    if (copy.carry.decay.defined()) {
      const at::Tensor left = copy.carry.decay.exp().to(state.carry.S.scalar_type());
      state.carry.S.mul_(left.view({a.B, a.G, 1, 1})), state.carry.z.mul_(left.unsqueeze(-1));
      state.carry.decay.add_(copy.carry.decay);
    }
    state.carry.S.add_(copy.carry.S), state.carry.z.add_(copy.carry.z);
    if (state.carry.keys.defined()) state.carry.keys.add_(copy.carry.keys);
  }
  state.carry.count.add_(later.carry.count);
  if (state.carry.gates.defined()) state.carry.gates.add_(later.carry.gates);
  state.tokens += later.tokens;
}

}  // namespace horner::attn

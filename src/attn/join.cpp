#include "attn/join.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>

#include "attn/inputs.h"
#include "attn/state.h"
#include "core/check.h"

namespace horner::attn {

static State changed(State s, const std::function<at::Tensor(const at::Tensor&)>& change) {
  for (const auto& [name, x] : tensors_of(s))
    if (x->defined()) *x = change(*x);
  return s;
}

State snapshot(const State& s) {
  return changed(s, [](const at::Tensor& x) { return x.clone(); });
}

State select(const State& s, const at::Tensor& rows) {
  check(rows.dim() == 1 && at::isIntegralType(rows.scalar_type(), false) && !rows.is_meta(),
        "rows must have shape [n] and dtype int32 or int64, got ", rows.sizes(), " ",
        dtype_name(rows.scalar_type()));
  const at::Tensor index = rows.to(s.carry.count.device()).to(at::kLong);
  check(index.numel() == 0 ||
            (index.min().item<int64_t>() >= 0 && index.max().item<int64_t>() < s.shape.B),
        "rows must be 0 to ", s.shape.B - 1, ", the batch of this state");
  State out = changed(s, [&](const at::Tensor& x) { return x.index_select(0, index); });
  out.shape.B = rows.numel();
  return out;
}

std::string why_not_joined(const Spec& spec) {
  const Reach r = reach(spec.mask);
  return r.chunk > 0   ? "the chunks of its mask begin at other tokens in streams of other lengths"
         : r.first > 0 ? "its mask shows the first keys, which streams of other lengths have at "
                         "other places"
                       : "";
}

// Of each state the tensor that tensors_of() has at `place`.
static std::vector<at::Tensor> tensors_at(std::vector<State>& states, size_t place) {
  std::vector<at::Tensor> out;
  for (State& s : states) out.push_back(*tensors_of(s)[place].second);
  return out;
}

// How many of the held keys of a KV cache later queries may see: the last ones, and the first of a
// streaming mask.
static int64_t kept(const State& s) {
  return std::min(s.held, seen_by_newest(s));
}

// A tensor of room for `to.room` tokens, in which those that the caches keep end at `to.held`.
// Undefined where no cache has any.
static at::Tensor aligned(const std::vector<State>& states, const std::vector<at::Tensor>& tensors,
                          const State& to) {
  const auto like = std::ranges::find_if(tensors, [](const auto& x) { return x.defined(); });
  if (like == tensors.end()) return {};
  const int64_t axis = like->dim() == 2 ? 1 : 2;  // [B, S] or [B, G, S, ..]
  std::vector<int64_t> shape = like->sizes().vec();
  shape[0] = to.shape.B, shape[size_t(axis)] = to.room;
  const at::Tensor out = at::zeros(shape, like->options());
  int64_t row = 0;
  for (size_t i = 0; i < states.size(); row += states[i++].shape.B) {
    const State& s = states[i];
    const int64_t first = std::min<int64_t>(kept(s), reach(s.spec.mask).first),
                  last = kept(s) - first;
    if (!tensors[i].defined()) continue;
    const at::Tensor own = out.narrow(0, row, s.shape.B);
    own.narrow(axis, to.held - kept(s), first).copy_(tensors[i].narrow(axis, 0, first));
    own.narrow(axis, to.held - last, last).copy_(tensors[i].narrow(axis, s.held - last, last));
  }
  return out;
}

// Gives every state a mask of its recent keys if the batch has one: where a state has, where keys
// before a shorter cache are hidden, and where a sum has no key yet (see step_finite).
static void add_masks(std::vector<State>& states, const State& to) {
  const bool masked = std::ranges::any_of(states, [&](const State& s) {
    const bool shorter = to.finite ? s.tokens == 0 && to.tokens > 0 : kept(s) < to.held;
    return shorter || s.recent.keep.defined();
  });
  for (State& s : states)
    if (masked && !s.recent.keep.defined())
      s.recent.keep = at::ones({s.shape.B, s.room}, s.carry.count.options().dtype(at::kBool));
}

State joined(const std::vector<State>& given) {
  const c10::NoGradGuard without_gradients;
  check(!given.empty(), "expected states to join, got none");
  if (given.size() == 1) return snapshot(given[0]);
  std::vector<State> states = given;
  State out = given[0];
  out.shape.B = 0, out.held = 0;
  for (State& s : states) {
    check_alike("join", out, s);
    const StateShape &a = out.shape, &b = s.shape;
    check(a.G == b.G && a.D == b.D && a.E == b.E, "cannot join states of two shapes: k is [B, ",
          a.G, ", T, ", a.D, "] and [B, ", b.G, ", T, ", b.D, "], v [.., ", a.E, "] and [.., ", b.E,
          "]");
    check(out.finite == s.finite,
          "cannot join a state and a KV cache; make both with a buffer, or both without");
    check(out.kept == s.kept, "cannot join KV caches of two dtypes: ", dtype_name(out.kept),
          " and ", dtype_name(s.kept));
    const std::string reason = out.tokens == s.tokens ? "" : why_not_joined(s.spec);
    check(reason.empty(), "cannot join streams of ", out.tokens, " and ", s.tokens,
          " tokens: ", reason);
    if (s.finite && s.held > 0) s = snapshot(s), flush(s);
    out.tokens = std::max(out.tokens, s.tokens), out.shape.B += s.shape.B;
    out.held = std::max(out.held, kept(s));
  }
  if (!out.finite) out.room = std::max<int64_t>(2 * out.held, 64);
  add_masks(states, out);
  const auto to = tensors_of(out);
  for (size_t i = 0; i < to.size(); ++i) {
    const auto& [name, x] = to[i];
    const std::vector<at::Tensor> all = tensors_at(states, i);
    if (!name.starts_with("recent."))
      *x = all[0].defined() ? at::cat(all) : at::Tensor();
    else
      *x = aligned(states, all, out);
  }
  return out;
}

}  // namespace horner::attn

#include "attn/recompute.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "attn/exec/large.h"

namespace horner::attn {

namespace {

using torch::autograd::AutogradContext;
using Part = std::function<Tensors(const Tensors&)>;

struct Again : torch::CustomClassHolder {
  Part run;
  int64_t inputs;
  Again(Part r, int64_t n) : run(std::move(r)), inputs(n) {}
};

// `all`: the inputs, then the parameters, which are here for their gradients.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static Tensors forward(AutogradContext* ctx, const c10::intrusive_ptr<Again>& part,
                         at::TensorList all) {
    ctx->saved_data["part"] = c10::IValue::make_capsule(part);
    ctx->save_for_backward(all.vec());
    const c10::NoGradGuard without_gradients;
    return part->run({all.begin(), all.begin() + part->inputs});
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& grads) {
    const auto part =
        c10::static_intrusive_pointer_cast<Again>(ctx->saved_data["part"].toCapsule());
    Tensors all = ctx->get_saved_variables(), inputs;
    const c10::AutoGradMode with_gradients(true);
    for (int64_t i = 0; i < part->inputs; ++i)
      inputs.push_back(all[size_t(i)].detach().requires_grad_(true));
    const Tensors results = part->run(inputs);
    std::copy(inputs.begin(), inputs.end(), all.begin());
    Tensors wanted, outputs, given, out(all.size() + 1);
    std::vector<size_t> places;
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i].defined() && all[i].requires_grad()) wanted.push_back(all[i]), places.push_back(i);
    for (size_t i = 0; i < results.size(); ++i)
      if (grads[i].defined() && results[i].requires_grad())
        outputs.push_back(results[i]), given.push_back(grads[i]);
    const Tensors found = torch::autograd::grad(outputs, wanted, given, /*retain_graph=*/false,
                                                /*create_graph=*/false, /*allow_unused=*/true);
    for (size_t i = 0; i < found.size(); ++i) out[places[i] + 1] = found[i];
    return out;
  }
};

}  // namespace

Tensors recomputed(const Part& run, const Tensors& inputs, const Tensors& parameters) {
  Tensors all = inputs;
  all.insert(all.end(), parameters.begin(), parameters.end());
  return Recomputed::apply(c10::make_intrusive<Again>(run, int64_t(inputs.size())),
                           at::TensorList(all));
}

namespace {

struct Links : torch::CustomClassHolder {
  Chain chain;
  size_t inputs;            // how many; the rest are those of the first state that are defined
  std::vector<bool> given;  // which these are
  bool with_result = false;
  std::vector<Tensors> states;  // before each piece

  Links(Chain c, size_t n, const Tensors& state) : chain(std::move(c)), inputs(n) {
    for (const at::Tensor& x : state) given.push_back(x.defined());
  }

  int64_t pieces() const { return (chain.tokens + chain.piece - 1) / chain.piece; }
  at::Tensor part(const at::Tensor& x, int64_t axis, int64_t p) const {
    if (axis < 0 || !x.defined()) return x;
    const int64_t from = p * chain.piece;
    return x.narrow(axis, from, std::min(chain.piece, chain.tokens - from));
  }
  Tensors parts(at::TensorList x, int64_t p) const {
    Tensors out;
    for (size_t i = 0; i < inputs; ++i) out.push_back(part(x[i], chain.axes[i], p));
    return out;
  }
  // Puts the gradient of piece p of input i into that of all of it.
  void collect(const at::Tensor& input, size_t i, int64_t p, const at::Tensor& d,
               at::Tensor& all) const {
    const int64_t axis = chain.axes[i];
    if (axis < 0) {
      if (d.defined()) all = all.defined() ? all.add_(d) : d.clone();
      return;
    }
    if (!all.defined()) all = exec::large_empty(input.sizes(), input.options());
    const at::Tensor to = part(all, axis, p);
    d.defined() ? to.copy_(d) : to.zero_();
  }
};

// The result, if there is one, and the state after the last piece.
Tensors run_links(Links& links, at::TensorList all, bool keep) {
  Tensors state;
  auto next_given = all.begin() + int64_t(links.inputs);
  for (const bool given : links.given) state.push_back(given ? *next_given++ : at::Tensor());
  at::Tensor joined;
  for (int64_t p = 0; p < links.pieces(); ++p) {
    if (keep) links.states.push_back(state);
    auto [result, next] = links.chain.run(links.parts(all, p), state);
    state = std::move(next);
    if (!result.defined()) continue;
    if (p == 0) {
      std::vector<int64_t> shape = result.sizes().vec();
      shape[2] = links.chain.tokens;
      joined = links.pieces() == 1 ? result : exec::large_empty(shape, result.options());
    }
    if (links.pieces() > 1) links.part(joined, 2, p).copy_(result);
  }
  links.with_result = joined.defined();
  if (links.with_result) state.insert(state.begin(), joined);
  return state;
}

// A leaf of the same values.
at::Tensor leaf(const at::Tensor& x, bool needs_gradient) {
  return x.defined() && needs_gradient ? x.detach().requires_grad_(true) : x;
}

struct Chained : torch::autograd::Function<Chained> {
  static Tensors forward(AutogradContext* ctx, const c10::intrusive_ptr<Links>& links,
                         at::TensorList all) {
    ctx->saved_data["links"] = c10::IValue::make_capsule(links);
    ctx->save_for_backward({all.begin(), all.begin() + int64_t(links->inputs)});
    const c10::NoGradGuard without_gradients;
    return run_links(*links, all, true);
  }

  static Tensors backward(AutogradContext* ctx, const Tensors& grads) {
    const auto links =
        c10::static_intrusive_pointer_cast<Links>(ctx->saved_data["links"].toCapsule());
    const Tensors inputs = ctx->get_saved_variables();
    const size_t first = links->with_result, n = inputs.size();
    Tensors d_state(grads.begin() + int64_t(first), grads.end()), out(1 + n);
    const c10::AutoGradMode with_gradients(true);
    for (int64_t p = links->pieces() - 1; p >= 0; --p) {
      Tensors x = links->parts(inputs, p), s = links->states[size_t(p)];
      for (size_t i = 0; i < n; ++i) x[i] = leaf(x[i], inputs[i].requires_grad());
      for (at::Tensor& each : s) each = leaf(each, true);
      auto [result, next] = links->chain.run(x, s);
      Tensors outputs, given, wanted;
      const auto add = [&](const at::Tensor& y, const at::Tensor& d) {
        if (y.defined() && d.defined() && y.requires_grad())
          outputs.push_back(y), given.push_back(d);
      };
      if (first) add(result, links->part(grads[0], 2, p));
      for (size_t i = 0; i < next.size(); ++i) add(next[i], d_state[i]);
      const auto is_leaf = [](const at::Tensor& y) { return y.defined() && y.requires_grad(); };
      for (const Tensors* each : {&x, &s})
        std::copy_if(each->begin(), each->end(), std::back_inserter(wanted), is_leaf);
      Tensors found(wanted.size());
      if (!outputs.empty())
        found = torch::autograd::grad(outputs, wanted, given, /*retain_graph=*/false,
                                      /*create_graph=*/false, /*allow_unused=*/true);
      const c10::NoGradGuard without_gradients;
      auto at = found.begin();
      for (size_t i = 0; i < n; ++i)
        if (is_leaf(x[i])) links->collect(inputs[i], i, p, *at++, out[1 + i]);
      for (size_t i = 0; i < s.size(); ++i) d_state[i] = is_leaf(s[i]) ? *at++ : at::Tensor();
    }
    for (size_t i = 0; i < d_state.size(); ++i)
      if (links->given[i]) out.push_back(d_state[i]);
    return out;
  }
};

}  // namespace

std::pair<at::Tensor, Tensors> chained(const Chain& chain, const Tensors& inputs,
                                       const Tensors& state) {
  const auto links = c10::make_intrusive<Links>(chain, inputs.size(), state);
  Tensors all = inputs;
  for (const at::Tensor& x : state)
    if (x.defined()) all.push_back(x);
  Tensors out = exec::needs_gradients(all) ? Chained::apply(links, at::TensorList(all))
                                           : run_links(*links, all, false);
  if (!links->with_result) return {at::Tensor(), out};
  return {out[0], Tensors(out.begin() + 1, out.end())};
}

}  // namespace horner::attn

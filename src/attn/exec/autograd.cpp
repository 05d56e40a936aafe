// The only source of attn that knows torch::autograd::Function, whose header is slow to compile.
#include "attn/exec/autograd.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "core/check.h"

namespace horner::attn::exec {

using torch::autograd::AutogradContext;

bool needs_gradients(at::TensorList tensors) {
  return at::GradMode::is_enabled() &&
         std::ranges::any_of(tensors, [](auto& x) { return x.defined() && x.requires_grad(); });
}

bool keeps_graph() {
  return torch::autograd::get_current_graph_task_keep_graph();
}

static bool is_stand_in(const at::Tensor& x) {
  static const c10::DispatchKeySet keys =
      c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::Functionalize}) |
      c10::functorch_transforms_ks;
  return x.key_set().has_any(keys);
}

struct Backward : torch::CustomClassHolder {
  explicit Backward(const Recorded& r)
      : execution(r.execution), inputs(r.inputs.size()), run(r.backward) {}
  std::string_view execution;
  size_t inputs;
  decltype(Recorded::backward) run;
};

struct Record : torch::autograd::Function<Record> {
  // torch takes the tensors of a TensorList as variables, and requires them to be defined.
  static TensorVector forward(AutogradContext* ctx, const Recorded& r, at::TensorList) {
    auto [outputs, saved] = r.forward();
    saved.insert(saved.begin(), r.inputs.begin(), r.inputs.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["backward"] = c10::IValue::make_capsule(c10::make_intrusive<Backward>(r));
    return outputs;
  }
  static TensorVector backward(AutogradContext* ctx, const TensorVector& grads) {
    const auto held = ctx->saved_data["backward"].toCapsule();
    const auto& backward = static_cast<const Backward&>(*held);
    check(!c10::GradMode::is_enabled(), "double backward is supported only by 'reference', not '",
          backward.execution, "'");
    for (const at::Tensor& x : grads)  // kernels read its memory
      check(!x.defined() || (x.layout() == at::kStrided && x.has_storage() && !is_stand_in(x)),
            "a gradient of '", backward.execution,
            "' must be a plain dense tensor: vmap over gradients is not supported");
    const TensorVector saved = ctx->get_saved_variables();
    const at::TensorList all = saved, inputs = all.slice(0, backward.inputs);
    const c10::DeviceGuard guard(inputs[0].device());
    const TensorVector d = backward.run(inputs, all.slice(backward.inputs), grads);
    TensorVector out(1);  // none for `Recorded`
    for (size_t i = 0; i < d.size(); ++i)
      if (inputs[i].defined()) out.push_back(d[i]);
    return out;
  }
};

TensorVector record(const Recorded& r) {
  TensorVector defined;
  std::ranges::copy_if(r.inputs, std::back_inserter(defined), &at::Tensor::defined);
  return Record::apply(r, at::TensorList(defined));
}

}  // namespace horner::attn::exec

#include "attn/recompute.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

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

}  // namespace horner::attn

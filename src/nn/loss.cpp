// Cross-entropy a slice of tokens at a time; the gradients are made while the slice's logits are
// there, so that no logits are kept.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/check.h"
#include "nn/model.h"

namespace horner::nn {

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& head, const at::Tensor& targets) {
    constexpr int64_t kSlice = 1024;
    const int64_t n = x.size(0);
    const at::Tensor counted = targets >= 0;
    const double count = std::max<double>(1, counted.sum().item<double>());
    at::Tensor total = at::zeros({}, at::kDouble);
    at::Tensor dx, dhead;
    if (x.requires_grad()) dx = at::empty_like(x);
    if (head.requires_grad()) dhead = at::zeros(head.sizes(), at::kFloat);
    for (int64_t t = 0; t < n; t += kSlice) {
      const int64_t m = std::min(kSlice, n - t);
      const at::Tensor xs = x.narrow(0, t, m), keep = counted.narrow(0, t, m);
      const at::Tensor wanted = targets.narrow(0, t, m).clamp_min(0).unsqueeze(1);
      at::Tensor p = at::linear(xs, head).to(at::kFloat).log_softmax(-1);
      total -=
          p.gather(1, wanted).squeeze(1).masked_fill(keep.logical_not(), 0).sum().to(at::kDouble);
      if (!dx.defined() && !dhead.defined()) continue;
      p.exp_();
      p.scatter_add_(1, wanted, at::full({m, 1}, -1.f));
      p.mul_((keep.to(at::kFloat) / count).unsqueeze(1));
      const at::Tensor g = p.to(head.scalar_type());
      if (dx.defined()) dx.narrow(0, t, m).copy_(at::matmul(g, head));
      if (dhead.defined()) dhead.addmm_(g.t().to(at::kFloat), xs.to(at::kFloat));
    }
    ctx->save_for_backward({dx, dhead});
    ctx->saved_data["dtype"] = int64_t(head.scalar_type());
    return (total / count).to(at::kFloat);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto dtype = at::ScalarType(ctx->saved_data["dtype"].toInt());
    const auto times = [&](const at::Tensor& x) {
      return x.defined() ? (x * grads[0]).to(dtype) : x;
    };
    return {times(saved[0]), times(saved[1]), at::Tensor()};
  }
};

at::Tensor cross_entropy(const Model& m, const at::Tensor& hidden, const at::Tensor& targets) {
  check(hidden.dim() == 2 && targets.dim() == 1 && targets.size(0) == hidden.size(0),
        "the loss needs hidden [n, C] and targets [n], not ", hidden.sizes(), " and ",
        targets.sizes());
  return CrossEntropy::apply(hidden, m.config.tied ? m.embedding : m.head, targets);
}

}  // namespace horner::nn

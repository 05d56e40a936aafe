// Cross-entropy, one slice of tokens at a time. The forward pass also computes the gradients, in
// place of the slice's logits, so that no logits are kept.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/check.h"
#include "nn/model.h"
#include "nn/parts.h"

namespace horner::nn {

// Large enough for a fast product, small enough for little memory.
static int64_t slice_rows(const at::Tensor& head, bool cpu) {
  const int64_t numbers = cpu ? int64_t(1) << 24 : int64_t(1) << 27;
  return std::clamp<int64_t>(numbers / std::max<int64_t>(1, head.size(0)), 128, 8192);
}

// Never synchronizes with the device.
struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& given_head, const at::Tensor& targets, double cap) {
    const at::Tensor head = given_head.to(x.scalar_type());  // mixed precision: cast once
    const int64_t n = x.size(0), slice = slice_rows(head, x.is_cpu());
    const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor scale = (targets >= 0).sum().clamp_min(1).to(wide).reciprocal();
    const at::Tensor each = at::empty({n}, x.options().dtype(wide));
    at::Tensor dx, dhead;
    if (x.requires_grad()) dx = at::empty_like(x);
    const bool learns = given_head.requires_grad();
    for (int64_t t = 0; t < n; t += slice) {
      const int64_t m = std::min(slice, n - t);
      const at::Tensor xs = x.narrow(0, t, m), g = parts::times(xs, head.t());
      at::Tensor slope;  // of the cap, c tanh(g / c)
      if (cap > 0) {
        g.div_(cap).tanh_();
        slope = 1 - g * g;
        g.mul_(cap);
      }
      each.narrow(0, t, m).copy_(
          parts::losses_(g, targets.narrow(0, t, m), scale, dx.defined() || learns));
      if (cap > 0) g.mul_(slope);
      if (dx.defined()) {
        at::Tensor to = dx.narrow(0, t, m);
        parts::times_to(to, g, head);
      }
      if (!learns) continue;
      const at::Tensor part = parts::times(g.t(), xs);
      dhead = dhead.defined() ? dhead.add_(part) : part.to(wide);
    }
    ctx->save_for_backward({dx, dhead});
    ctx->saved_data["dtype"] = int64_t(given_head.scalar_type());
    return (each.sum(at::kDouble) * scale).to(wide);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto dtype = at::ScalarType(ctx->saved_data["dtype"].toInt());
    const at::Tensor dx =
        saved[0].defined() ? saved[0] * grads[0].to(saved[0].scalar_type()) : saved[0];
    const at::Tensor dhead = saved[1].defined() ? (saved[1] * grads[0]).to(dtype) : saved[1];
    return {dx, dhead, at::Tensor(), at::Tensor()};
  }
};

at::Tensor cross_entropy(const Model& m, const at::Tensor& hidden, const at::Tensor& targets) {
  check(hidden.dim() == 2 && targets.dim() == 1 && targets.size(0) == hidden.size(0),
        "the loss requires hidden [n, C] and targets [n], got ", hidden.sizes(), " and ",
        targets.sizes());
  return CrossEntropy::apply(hidden, m.config.tied ? m.embedding : m.head, targets,
                             m.config.final_softcap);
}

}  // namespace horner::nn

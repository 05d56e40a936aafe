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

// Logits of rows x, c tanh(y / c) where there is a cap, and the slope of that.
struct Logits {
  at::Tensor y, slope;
};
static Logits capped_logits(const at::Tensor& x, const at::Tensor& head, double cap, bool slope) {
  Logits out{parts::times(x, head.t()), {}};
  if (cap == 0) return out;
  out.y.div_(cap).tanh_();
  if (slope) out.slope = 1 - out.y * out.y;
  out.y.mul_(cap);
  return out;
}

// What the losses share: gradients of the rows and of the head, from those of the logits.
struct Gradients {
  at::Tensor dx, dhead;

  void add(int64_t t, const at::Tensor& g, const Logits& logits, const at::Tensor& x,
           const at::Tensor& head, bool learns) {
    if (logits.slope.defined()) g.mul_(logits.slope);
    if (dx.defined()) {
      at::Tensor to = dx.narrow(0, t, x.size(0));
      parts::times_to(to, g, head);
    }
    if (!learns) return;
    const at::Tensor part = parts::times(g.t(), x);
    const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    dhead = dhead.defined() ? dhead.add_(part) : part.to(wide);
  }
};

static std::pair<at::Tensor, at::Tensor> scaled_gradients(torch::autograd::AutogradContext* ctx,
                                                          const std::vector<at::Tensor>& grads) {
  const auto saved = ctx->get_saved_variables();
  const auto dtype = at::ScalarType(ctx->saved_data["dtype"].toInt());
  return {saved[0].defined() ? saved[0] * grads[0].to(saved[0].scalar_type()) : saved[0],
          saved[1].defined() ? (saved[1] * grads[0]).to(dtype) : saved[1]};
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
    Gradients d;
    if (x.requires_grad()) d.dx = at::empty_like(x);
    const bool learns = given_head.requires_grad(), any = d.dx.defined() || learns;
    for (int64_t t = 0; t < n; t += slice) {
      const int64_t m = std::min(slice, n - t);
      const at::Tensor xs = x.narrow(0, t, m);
      const Logits g = capped_logits(xs, head, cap, any);
      each.narrow(0, t, m).copy_(parts::losses_(g.y, targets.narrow(0, t, m), scale, any));
      if (any) d.add(t, g.y, g, xs, head, learns);
    }
    ctx->save_for_backward({d.dx, d.dhead});
    ctx->saved_data["dtype"] = int64_t(given_head.scalar_type());
    return (each.sum(at::kDouble) * scale).to(wide);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    const auto [dx, dhead] = scaled_gradients(ctx, grads);
    return {dx, dhead, at::Tensor(), at::Tensor()};
  }
};

struct Distillation : torch::autograd::Function<Distillation> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& given_head, double cap, const at::Tensor& teacher_x,
                            const at::Tensor& teacher_head, double teacher_cap,
                            const at::Tensor& targets, double share) {
    const at::Tensor head = given_head.to(x.scalar_type());
    const at::Tensor other = teacher_head.to(teacher_x.scalar_type());
    const int64_t n = x.size(0), slice = slice_rows(head, x.is_cpu());
    const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor counts = (targets >= 0).to(wide);
    const at::Tensor scale = counts.sum().clamp_min(1).reciprocal();
    at::Tensor sum = at::zeros({}, x.options().dtype(at::kDouble));
    Gradients d;
    if (x.requires_grad()) d.dx = at::empty_like(x);
    const bool learns = given_head.requires_grad(), any = d.dx.defined() || learns;
    for (int64_t t = 0; t < n; t += slice) {
      const int64_t m = std::min(slice, n - t);
      const at::Tensor xs = x.narrow(0, t, m), seen = counts.narrow(0, t, m).unsqueeze(1);
      const Logits g = capped_logits(xs, head, cap, any);
      const at::Tensor log_p = g.y.to(wide).log_softmax(-1);
      const at::Tensor log_q = capped_logits(teacher_x.narrow(0, t, m), other, teacher_cap, false)
                                   .y.to(wide)
                                   .log_softmax(-1);
      const at::Tensor q = log_q.exp(), target = targets.narrow(0, t, m).clamp_min(0).unsqueeze(1);
      const at::Tensor hard = -log_p.gather(1, target), soft = (q * (log_q - log_p)).sum(1, true);
      sum += ((hard * (1 - share) + soft * share) * seen).sum(at::kDouble);
      if (!any) continue;
      at::Tensor e = log_p.exp() - q * share;  // p - (share q + (1 - share) [target])
      e.scatter_add_(1, target, at::full_like(hard, share - 1));
      d.add(t, (e * seen * scale).to(x.scalar_type()), g, xs, head, learns);
    }
    ctx->save_for_backward({d.dx, d.dhead});
    ctx->saved_data["dtype"] = int64_t(given_head.scalar_type());
    return (sum * scale).to(wide);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* ctx,
                                          const std::vector<at::Tensor>& grads) {
    const auto [dx, dhead] = scaled_gradients(ctx, grads);
    return {dx, dhead, {}, {}, {}, {}, {}, {}};
  }
};

at::Tensor cross_entropy(const Model& m, const at::Tensor& hidden, const at::Tensor& targets) {
  check(hidden.dim() == 2 && targets.dim() == 1 && targets.size(0) == hidden.size(0),
        "the loss requires hidden [n, C] and targets [n], got ", hidden.sizes(), " and ",
        targets.sizes());
  return CrossEntropy::apply(hidden, m.config.tied ? m.embedding : m.head, targets,
                             m.config.final_softcap);
}

at::Tensor distillation(const Model& m, const at::Tensor& hidden, const Model& teacher,
                        const at::Tensor& teacher_hidden, const at::Tensor& targets, double share) {
  check(hidden.dim() == 2 && hidden.size(0) == teacher_hidden.size(0) &&
            targets.size(0) == hidden.size(0) && m.config.V == teacher.config.V,
        "distillation requires hidden rows [n, C] of two models of one vocabulary and targets [n], "
        "got ",
        hidden.sizes(), ", ", teacher_hidden.sizes(), " and ", targets.sizes());
  const auto head = [](const Model& of) { return of.config.tied ? of.embedding : of.head; };
  return Distillation::apply(hidden, head(m), m.config.final_softcap, teacher_hidden.detach(),
                             head(teacher).detach(), teacher.config.final_softcap, targets, share);
}

}  // namespace horner::nn

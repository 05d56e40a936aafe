// The definition of each part, in torch operators: the reference of tests/parts_test.cpp, and the
// fallback where there is no kernel. 16-bit inputs are computed in float32 and rounded once.
#include <ATen/ATen.h>

#include "nn/parts.h"

namespace horner::nn::parts::reference {

static at::Tensor wide(const at::Tensor& x) {
  return at::isReducedFloatingType(x.scalar_type()) ? x.to(at::kFloat) : x;
}

at::Tensor norm(const Norm& n, const at::Tensor& given, const at::Tensor& weight,
                const at::Tensor& bias, at::ScalarType out) {
  at::Tensor x = wide(given);
  if (n.layer) x = x - x.mean(-1, true);
  at::Tensor y = x * (x.square().mean(-1, true) + n.eps).rsqrt() * (wide(weight) + n.plus);
  if (bias.defined()) y = y + wide(bias);
  return y.to(out);
}

std::array<at::Tensor, 3> heads(const Heads& h, const at::Tensor& x, const at::Tensor& q_norm,
                                const at::Tensor& k_norm, const Rotation& by) {
  const auto parts = wide(x).split_with_sizes({h.H * h.D, h.G * h.D, h.G * h.D}, -1);
  std::array<at::Tensor, 3> out;
  for (size_t i = 0; i < 3; ++i) {
    at::Tensor y = parts[i].reshape({h.B, h.T, -1, h.D}).transpose(1, 2);
    const at::Tensor weight = i == 0 ? q_norm : i == 1 ? k_norm : at::Tensor();
    if (weight.defined()) y = reference::norm(h.norm, y, weight, {}, y.scalar_type());
    if (i < 2 && by.cos.defined()) {
      const auto half = y.chunk(2, -1);
      y = at::cat({half[0] * by.cos - half[1] * by.sin, half[1] * by.cos + half[0] * by.sin}, -1);
    }
    out[i] = y.to(x.scalar_type());
  }
  return out;
}

static at::Tensor act(Activation f, const at::Tensor& x) {
  return f == Activation::silu ? at::silu(x) : at::gelu(x, f == Activation::gelu ? "tanh" : "none");
}
at::Tensor activated(Activation f, const at::Tensor& x) {
  return act(f, wide(x)).to(x.scalar_type());
}
at::Tensor gated(Activation f, const at::Tensor& x) {
  const auto half = wide(x).chunk(2, -1);
  return (act(f, half[0]) * half[1]).to(x.scalar_type());
}

at::Tensor losses(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor p = wide(logits).log_softmax(-1);
  const at::Tensor wanted = p.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
  return -wanted.masked_fill(targets < 0, 0);
}

}  // namespace horner::nn::parts::reference

// The parts of a model around its matrix products, each one pass over the rows, with gradients.
// Fused kernels run float32 and bfloat16 on the CPU, and float32, bfloat16 and float16 on CUDA,
// with float32 arithmetic; other dtypes (double) run the definitions in `parts::reference`.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <utility>
#include <vector>

namespace horner::nn::parts {

// y = (x - m) / sqrt(mean((x - m)^2) + eps) * (plus + weight) + bias, where m = mean(x) if `layer`
// is set, otherwise 0.
struct Norm {
  bool layer = false;
  double plus = 0, eps = 1e-6;
};
// The norm of x [N, C], in the dtype `out`. The bias may be undefined.
at::Tensor norm(const Norm&, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                at::ScalarType out);
// x + added, in the dtype of x, and its norm, in the dtype of `added`.
std::pair<at::Tensor, at::Tensor> add_norm(const Norm&, const at::Tensor& x,
                                           const at::Tensor& added, const at::Tensor& weight,
                                           const at::Tensor& bias);

// Splits rows (q | k | v) of H, G and G heads, [B T, (H + 2 G) D], into q, k, v [B, heads, T, D].
// q and k are normalized if the weights are defined, and rotated (RoPE) if the angles are:
// (a, b) -> (a cos - b sin, b cos + a sin), where a and b are the halves of a head.
struct Heads {
  int64_t B, T, H, G, D;
  Norm norm;
};
struct Rotation {
  at::Tensor cos, sin;  // [T, D / 2], float32 (double for double)
};
std::array<at::Tensor, 3> heads(const Heads&, const at::Tensor& x, const at::Tensor& q_norm,
                                const at::Tensor& k_norm, const Rotation&);

enum class Activation { silu, gelu, gelu_erf };  // gelu: tanh approximation
// [N, M] -> [N, M]
at::Tensor activated(Activation, const at::Tensor& x);
// Rows (gate | up), [N, 2 M] -> f(gate) up, [N, M]
at::Tensor gated(Activation, const at::Tensor& x);

// -log softmax(logits)[target] of each row, [N], float32; 0 for a negative target. If `gradient` is
// set, the gradient of the loss times `scale`, a scalar on the same device, replaces the logits
// [N, V].
at::Tensor losses_(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& scale,
                   bool gradient);

// x [N, C] times each weight [out, C], plus its bias if given, concatenated: [N, sum of out], in
// the dtype of x. If gradients are needed, the weights are concatenated in that dtype for one
// product; their gradients have the dtypes of the weights.
at::Tensor product(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                   const std::vector<at::Tensor>& biases = {});

// a [M, K] times b [K, N], with any strides, plus a bias [N] if defined; not differentiable.
at::Tensor times(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {});
void times_to(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
              const at::Tensor& bias = {});
// The same with our own kernel, whether or not it is faster than torch: float32 on the CPU, with
// contiguous rows of a and out.
void times_by_own(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const at::Tensor& bias = {});

// The definitions, in torch operators.
namespace reference {
at::Tensor norm(const Norm&, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                at::ScalarType out);
std::array<at::Tensor, 3> heads(const Heads&, const at::Tensor& x, const at::Tensor& q_norm,
                                const at::Tensor& k_norm, const Rotation&);
at::Tensor activated(Activation, const at::Tensor& x);
at::Tensor gated(Activation, const at::Tensor& x);
at::Tensor losses(const at::Tensor& logits, const at::Tensor& targets);
}  // namespace reference

}  // namespace horner::nn::parts

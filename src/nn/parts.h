// The parts of a model around its matrix products, each one pass over the rows, with gradients:
// kernels of our own for float32 and bfloat16 on the CPU and float32, bfloat16 and float16 on CUDA,
// float32 inside; anything else (double) takes the definitions in `parts::reference`.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <utility>
#include <vector>

namespace horner::nn::parts {

// y = (x - mean(x)) / sqrt(mean of its squares + eps) * (plus + weight) + bias; without the mean
// unless `layer`.
struct Norm {
  bool layer = false;
  double plus = 0, eps = 1e-6;
};
// Of x [N, C]; the result in the dtype `out`. The bias may be undefined.
at::Tensor norm(const Norm&, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                at::ScalarType out);
// x + added in the dtype of x, and its norm in that of `added`.
std::pair<at::Tensor, at::Tensor> add_norm(const Norm&, const at::Tensor& x,
                                           const at::Tensor& added, const at::Tensor& weight,
                                           const at::Tensor& bias);

// Rows (q | k | v) of H, G and G heads, [B T, (H + 2 G) D], as q, k, v [B, heads, T, D]; q and k
// normed where the weights are defined, and turned where the angles are: a half a head each,
// (a cos - b sin, b cos + a sin).
struct Heads {
  int64_t B, T, H, G, D;
  Norm norm;
};
struct Rotation {
  at::Tensor cos, sin;  // [T, D / 2], float32 (double for double)
};
std::array<at::Tensor, 3> heads(const Heads&, const at::Tensor& x, const at::Tensor& q_norm,
                                const at::Tensor& k_norm, const Rotation&);

enum class Activation { silu, gelu };  // gelu: by tanh
// [N, M] -> [N, M]
at::Tensor activated(Activation, const at::Tensor& x);
// Rows (gate | up), [N, 2 M] -> f(gate) up, [N, M]
at::Tensor gated(Activation, const at::Tensor& x);

// -log softmax(logits)[target] of each row, [N], float32; 0 where the target is below 0. If
// `gradient`, the logits [N, V] become the loss's gradient times `scale`, one number on their
// device.
at::Tensor losses_(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& scale,
                   bool gradient);

// x [N, C] times each weight [out, C], plus its bias (undefined, or missing at the end: none), side
// by side: [N, all out], in the dtype of x. Where gradients are wanted the weights are copied below
// each other, in that dtype, and the product is one; theirs come back in their own dtypes.
at::Tensor product(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                   const std::vector<at::Tensor>& biases = {});

// a [M, K] times b [K, N], of any strides, plus a bias [N] unless it is undefined; without
// gradients.
at::Tensor times(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {});
void times_to(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
              const at::Tensor& bias = {});
// The same by our own kernel, of float32 on the CPU, whether or not it is the fastest there; the
// numbers of a row of a and out lie side by side.
void times_by_own(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const at::Tensor& bias = {});

// The definitions, in torch's own operators.
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

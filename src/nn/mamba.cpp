// A Mamba-2 block (arXiv 2405.21060) around an operator of the catalog. From a token's row:
//   (z, u, dt) = projections of the row; (x, B, C) = silu(convolution(u))
//   dt = softplus(dt + b) of each head, log decay = -exp(A_log) dt
//   y  = operator(q = C, k = B, v = x, input gate = dt, decay), with B and C shared by the heads
//   result = output projection of RMSNorm((y + D x) silu(z)), the norm over all channels
// The state of a head has as many rows as a head has channels.
#include <ATen/ATen.h>

#include "nn/layer.h"

namespace horner::nn {

at::Tensor mamba(const Pass& p, size_t i, const at::Tensor& rows) {
  constexpr double kEps = 1e-5;
  const ModelConfig& c = p.m.config;
  const Layer& l = p.m.layers[i];
  const auto weight = [&](const char* name) { return l.variant.at(std::string("mamba.") + name); };
  const int64_t inner = c.H * c.D;
  const auto all = parts::product(rows, {weight("z.weight"), weight("x.weight"), weight("B.weight"),
                                         weight("C.weight"), weight("dt.weight")})
                       .split_with_sizes({inner, inner + 2 * c.D, c.H}, 1);
  const auto u = convolved(p, i, all[1], weight("conv.weight"), weight("conv.bias"))
                     .split_with_sizes({inner, c.D, c.D}, 1);
  const auto shared = [&](const at::Tensor& x) {  // by the heads
    return x.reshape({p.B, 1, p.T, c.D}).expand({p.B, c.H, p.T, c.D});
  };
  const at::Tensor bias = weight("dt.bias");
  const at::Tensor dt = at::softplus(all[2].to(bias.scalar_type()) + bias)
                            .view({p.B, p.T, c.H})
                            .transpose(1, 2);  // [B, H, T]
  attn::Inputs in{.q = shared(u[2]),
                  .k = shared(u[1]),
                  .v = u[0].reshape({p.B, p.T, c.H, c.D}).transpose(1, 2),
                  .decay = -weight("A_log").exp().unsqueeze(1) * dt,
                  .input_gate = dt};
  add_variant_inputs(p, i, 0, rows, in);
  const at::Tensor y = rows_of(operate(p, i, 0, in)) + weight("D") * u[0];
  const at::Tensor normed = parts::norm({.eps = kEps}, y * at::silu(all[0]), weight("norm.weight"),
                                        {}, rows.scalar_type());
  return parts::product(normed, {l.o}, {l.o_bias});
}

}  // namespace horner::nn

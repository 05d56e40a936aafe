// The attention of one layer, with its projections; private to nn.
#pragma once

#include "nn/model.h"
#include "nn/parts.h"

namespace horner::nn {

struct Pass {  // shared by the layers of one forward pass
  const Model& m;
  const Run& run;
  int64_t B, T;

  LayerState* state(size_t layer) const { return run.states ? &(*run.states)[layer] : nullptr; }
};

parts::Norm norm_of(const ModelConfig&);  // of the family

// Rows [B T, C] -> [B T, C].
at::Tensor attention(const Pass&, size_t layer, const at::Tensor& x, const parts::Rotation&);

// The same of a Mamba-2 block.
at::Tensor mamba(const Pass&, size_t layer, const at::Tensor& x);

// SiLU of a causal convolution of each channel over n tokens,
//   y_t = sum_j weight_j x_(t - n + 1 + j) + bias,
// of rows [B T, channels], with a weight [channels, n] and a bias [channels] or none, in the dtype
// of the rows.
at::Tensor convolved(const Pass&, size_t layer, const at::Tensor& rows, const at::Tensor& weight,
                     const at::Tensor& bias = {});

// Adds the inputs of a part's variant that are still undefined, from the token rows x [B T, C].
void add_variant_inputs(const Pass&, size_t layer, size_t part, const at::Tensor& x, attn::Inputs&);

// The operator of a part, or a step of its state: [B, heads, T, E]. Probes see it.
at::Tensor operate(const Pass&, size_t layer, size_t part, const attn::Inputs&);

at::Tensor rows_of(const at::Tensor& heads);  // [B, heads, T, E] -> [B T, heads E]

}  // namespace horner::nn

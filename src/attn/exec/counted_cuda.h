// Stages that depend on the keys of a row but not on its weights, by kernels
// (kernels/cuda/prepare/counts.h) where they exist and tensor code elsewhere. Backward needs only
// their inputs.
#pragma once

#include "attn/exec/cuda.h"
#include "attn/stages.h"

namespace horner::attn::exec {

// Running sums of log gates [B, G, S], in double; undefined for none. `skips_nan`: a NaN counts as
// 0, and the caller calls `spoil_rows`.
at::Tensor decay_sums(const at::Tensor& gates, bool skips_nan);
// Sets to NaN the rows of each tensor [B, H, T, ..] that see a key before a gate that is NaN, and
// all rows of those `by_last` where the last one does. Undefined tensors are skipped.
void spoil_rows(const at::Tensor& gates, const kernels::cuda::Seen&,
                const kernels::cuda::SeenLists&, at::TensorList, at::TensorList by_last = {});
// The memory of `f.d_decay_query` and `f.d_decay_key`, and the gradient of the log gates from them,
// in the dtype of the gates. `after`: that of the gate after each `part` of the tokens, in double;
// undefined if there is one part.
struct DecayGradient {
  at::Tensor query, key;

  // Undefined where the gates have no gradient.
  DecayGradient(kernels::cuda::Fused&, const at::Tensor& gates);
  at::Tensor of_gates(const at::Tensor& gates, const at::Tensor& after = {}, int part = 0) const;
};

// The divisor of each row, or the count for the floor of its sum, where the kernels do not compute
// it: float32 [B, H, T], else undefined.
at::Tensor divisor_on_gpu(const Spec&, const Inputs&, const CountedKeys&);

// Scale and sharpness of LogLength and LogPower: float32, broadcasts to [B, H, T, 1].
at::Tensor scale_on_gpu(const Spec&, const Inputs&, const CountedKeys&);

// log n of each row: float32 [B, H, T].
at::Tensor log_count_on_gpu(const Spec&, const Inputs&, const CountedKeys&);

// `finish` of stages.h, with the sums but without what the denominator counts.
at::Tensor finish_on_gpu(const Spec&, const Inputs&, const CountedKeys&, Sums);

}  // namespace horner::attn::exec

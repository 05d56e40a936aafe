// What a row has of the keys that it sees, other than its weights, by kernels
// (kernels/counted_cuda.h) where there are some, otherwise as tensor code. Kept for backward: the
// inputs.
#pragma once

#include "attn/exec/cuda.h"

namespace horner::attn::exec {

// Running sums of log gates [B, G, S], in double; undefined for none.
at::Tensor decay_on_gpu(const at::Tensor& gates);

// What divides a row where that is not its sum: float32 [B, H, T], or undefined for 1.
at::Tensor divisor_on_gpu(const Spec&, const Inputs&, const CountedKeys&);

// Scale and sharpness of LogLength and LogPower: float32, broadcasts to [B, H, T, 1].
at::Tensor scale_on_gpu(const Spec&, const Inputs&, const CountedKeys&);

}  // namespace horner::attn::exec

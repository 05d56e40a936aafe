// The bfloat16 kernels of delta_cuda, in chunks on the tensor cores.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

namespace horner::attn::exec {

// Differentiable but for `scale` and `most`. q, k and v are bfloat16 [B, H, T, 64 or 128], one key
// head for each query head; beta and logs [B, H, T] are float32, channel_logs [B, H, T, 64 or 128]
// bfloat16 or float32. Without beta the values are not corrected. There is one kind of logs or
// none.
struct DeltaInputs {
  at::Tensor q, k, v, beta, logs, channel_logs;

  static auto fields(auto& x) {
    return std::array{&x.q, &x.k, &x.v, &x.beta, &x.logs, &x.channel_logs};
  }
};
// A state of keys of D channels and values of E, [B, G, D, E or more], float32 or double: before
// the tokens, and memory of its own for that after them. Both undefined for none; without
// gradients.
struct DeltaState {
  at::Tensor before, after;
  int64_t E = 0;
};
// Which rows of N are NaN: the log gates [B, G, T], of channels the largest, or undefined for none;
// and which keys are not hidden, [B, T], or undefined for all.
struct DeltaGates {
  at::Tensor logs, keep;
};
at::Tensor delta_in_chunks(const DeltaInputs&, double scale, double most, const DeltaGates&,
                           const DeltaState& = {});  // N

// Whether the GPU has the shared memory.
bool has_room_for_chunks(int64_t channels, bool channel_gates, bool corrected, int device);

// RMSNorm of the first channels of rows [B, H, T, 64 or 128], as many as `weight` has.
at::Tensor rms_of_rows(const at::Tensor& N, const at::Tensor& weight, double eps);

}  // namespace horner::attn::exec

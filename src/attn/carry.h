// The sums that a stream of tokens leaves behind:
//   S_t = g_t S_{t-1} + phi(k_t) v_t^T,  z_t = g_t z_{t-1} + phi(k_t),  N_t = phi(q_t) S_t
#pragma once

#include <ATen/core/Tensor.h>

namespace horner::attn {

// Undefined tensors at the beginning of a stream. E is padded to a multiple of 16; S and z are
// float32, or double for double inputs and where plan.h's sums_in_double says so.
struct Carry {
  at::Tensor S;      // [B, G, F, E]: sum of phi(k) v^T
  at::Tensor z;      // [B, G, F]: sum of phi(k)
  at::Tensor count;  // [B], double: the number of keys seen
  at::Tensor keys;   // [B, G, D], double: sum of the keys that S and z have, for centred rows
  at::Tensor gates;  // [B, G], double: sum of e^denominator_gate, for CumulativeGate
  at::Tensor decay;  // [B, G], double: sum of the log gates
  // For near=window(n), the last n keys and values, which S and z do not have yet, and whether they
  // are seen: [B, G, n, ..], [B, n]; with a decay the logs of their gates, [B, G, n] in double.
  at::Tensor near_k, near_v, near_keep, near_decay;
};

}  // namespace horner::attn

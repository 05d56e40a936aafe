// Linear attention with gates of tokens or channels and the delta rule, token after token, on an
// NVIDIA GPU: float32 tensors, sums in double.
//   S_t = g_t S_{t-1} + k_t u_t^T,   u_t = share_t (v_t - scale k_t g_t S_{t-1}),   or v_t
//   N_t = scale q_t S_t
// Forward and backward, for float32 and float16 inputs, and the steps of a decoder. Raw pointers
// and a stream.
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

inline constexpr int kMaxTokenChannels = 128;  // of a key; values may have any number

// All tensors are contiguous.
struct Tokens {
  int B, H, G, T, D, E;
  float scale;
  const float *q, *k, *v;  // [B, H, T, D], [B, G, T, D], [B, G, T, E]
  const float* share;      // [B, G, T], or null: u = v
  const double* gates;     // [B, G, T], or [B, G, T, D] of channels, or null
  bool channels;
  // The state before the tokens, or null for none, and where that after them goes, or null: [B, G,
  // D, state_row], float32 or double. They may be the same memory.
  const void* before;
  void* after;
  int state_row;
  bool state_in_double;
  float* N;     // [B, H, T, E]
  float* rest;  // [B, G, T, E], where there is a share: u_t = share_t rest_t; or null

  const float* dN;  // [B, H, T, E]
  float* du;        // [B, G, T, E]: the gradient of u; that of v is share du, or du
  float *dq, *dk;   // [B, H, T, D], [B, G, T, D]
  double* d_sums;   // [B, G, T, D]: the gradients of the running sums of the log gates, or null
};

// Each throws core/check.h's Error on failure.
void tokens_forward(const Tokens&, Stream);
void tokens_backward(const Tokens&, Stream);  // needs `rest`

}  // namespace horner::attn::kernels::cuda

// Attention with a decay of each channel (decay=channel_gate, weight=power(1)) in linear time, on
// the CPU:
//   N_t = sum_{s <= t} x_ts v_s,  W_t = sum_{s <= t} x_ts,
//   x_ts = scale sum_d q_td k_sd g_(s+1)d ... g_td
// Chunks of a few tokens, with the state S_t = diag(g_t) S_{t-1} + k_t v_t^T [D, E] between them.
// Decay is always a product of gates, one token after another: no quotient of products, nothing
// overflows, and a gate of 0 is a gate. R is float or double.
#pragma once

#include <cstdint>

#include "core/simd/isa.h"

namespace horner::attn::kernels {

inline constexpr int kChannelTokens = 16;  // per chunk

// Tensors are contiguous. E is padded; rows of q, k and gates are padded from D to `width`
// channels. Query head h reads key head h / (H / G).
template <class R>
struct Channels {
  int64_t B, H, G, T, D, width, E;
  R scale;
  const R *q, *k, *v;     // [B, H, T, width], [B, G, T, width], [B, G, T, E]
  const double* gates;    // [B, G, T, width]
  const uint8_t* keep;    // [B, T], or null
  const uint8_t* begins;  // [T]: whether a packed sequence begins, or null
  bool strict;            // a query does not see the key of its own token

  R *N, *W;  // [B, H, T, E], [B, H, T]
  R *S, *z;  // [B, G, D, E], [B, G, D]: the state before the tokens; forward and backward leave
             // that after them

  // Backward. dS and dz: the gradient of the state after the tokens, replaced by that before them.
  const R *dN, *dW;
  R *dS, *dz;
  R *dq, *dk, *dv;

  // solve: q is k, v is `corrected`, which it writes.
  const R* share;       // [B, G, T]
  R *rest, *corrected;  // [B, G, T, E]; rest holds the values at first
};

template <class R>
struct ChannelKernels {
  int64_t (*scratch)(const Channels<R>&);  // numbers per task
  // Tasks: B * G.
  void (*forward)(const Channels<R>&, int64_t task, R* scratch);
  void (*backward)(const Channels<R>&, int64_t task, R* scratch);
  // The delta rule: rest_t = v_t - N_t, corrected_t = share_t rest_t, where N_t is the sum of the
  // corrected values of the keys before t.
  void (*solve)(const Channels<R>&, int64_t task, R* scratch);
};

HORNER_PER_ISA(extern const ChannelKernels<float> channels_float;
               extern const ChannelKernels<double> channels_double;)

}  // namespace horner::attn::kernels

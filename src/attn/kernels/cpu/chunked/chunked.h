// Attention with a polynomial weight in linear time, on the CPU: quadratic inside a chunk of
// tokens, a state between chunks,
//   S_t = g_t S_{t-1} + phi(k_t) v_t^T   [F, E],   z_t = g_t z_{t-1} + phi(k_t)   [F]
// A segment is a run of chunks and a task: first the sums over each segment, then (scan) the states
// at the start of each segment, then all segments independently. R is float or double.
#pragma once

#include <cstdint>

#include "attn/math.h"
#include "core/simd/isa.h"

namespace horner::attn::kernels {

// The number of monomials of degree p in D variables.
inline int64_t monomials(int64_t D, int64_t p) {
  if (D == 0) return p == 0;
  const int64_t n = D - 1 + p, k = p < D - 1 ? p : D - 1;
  int64_t c = 1;
  for (int64_t i = 1; i <= k; ++i) c = c * (n - k + i) / i;
  return c;
}

inline constexpr int kMostTokens = 256;  // per chunk

// Tensors are contiguous. E is padded; rows of q and k are padded from D to `width` channels. Query
// head h reads key head h / (H / G).
template <class R>
struct Chunked {
  int64_t B, H, G, T, D, width, E;
  int first, last;  // orders
  PolynomialOf<R> weight;
  R scale;                   // multiplies q.k
  int64_t F;                 // features
  int C;                     // tokens per chunk, a multiple of the lanes
  int64_t segments, length;  // length: tokens per segment, a multiple of C
  const R *q, *k, *v;        // [B, H, T, width], [B, G, T, width], [B, G, T, E]
  const uint8_t* keep;       // [B, T], or null
  const double* decay;       // [B, G, T], running sums of the log decay gates, or null
  const R* centre;           // [B, H, T], or null
  const uint8_t* begins;     // [T]: whether a packed sequence begins, or null
  bool strict;               // a query does not see the key of its own token

  R *N, *W;  // [B, H, T, E], [B, H, T]
  // The state at the start of each segment, then the final state: segments + 1 slots, or one slot
  // that holds them one after the other.
  int64_t slots;
  R *S, *z;     // [B, G, slots, F, E], [.., F]
  bool filled;  // whether the initial state may be nonzero
  bool wanted;  // whether the final state is needed

  // Backward. dS and dz are the gradients of S and z. The first slot is unused; the last is 0
  // unless the final state is wanted.
  const R *dN, *dW;  // [B, H, T, E], [B, H, T]
  R *dS, *dz;
  R *dq, *dk, *dv;  // like q, k, v
  R* d_centre;      // [B, H, T], or null
  double* d_decay;  // [B, G, T], or null

  // solve: q is k, v is `corrected`, which it writes.
  const R* share;       // [B, G, T]
  R *rest, *corrected;  // [B, G, T, E]; rest holds the values at first
};

template <class R>
struct ChunkedKernels {
  int64_t (*scratch)(const Chunked<R>&);  // numbers per task
  // Tasks: B * G * segments.
  void (*sums)(const Chunked<R>&, int64_t task,
               R* scratch);  // S, z after the segment, starting from 0
  void (*forward)(const Chunked<R>&, int64_t task,
                  R* scratch);  // from the states; writes the final state
  void (*backward_sums)(const Chunked<R>&, int64_t task, R* scratch);
  void (*backward)(const Chunked<R>&, int64_t task, R* scratch);
  // Tasks: B * G. Turns the sums of segments into states.
  void (*scan)(const Chunked<R>&, int64_t task);
  void (*backward_scan)(const Chunked<R>&, int64_t task);
  // Tasks: B * G, from the states in slot 0, which it changes, in one segment. The delta rule:
  //   rest_t = v_t - N_t,  corrected_t = share_t rest_t,
  // where N_t is the sum of the corrected values of the keys before t.
  void (*solve)(const Chunked<R>&, int64_t task, R* scratch);
};

// In portable, avx2 and avx512: the sets above would not speed these up.
HORNER_PER_ISA(extern const ChunkedKernels<float> chunked_float;
               extern const ChunkedKernels<double> chunked_double;)

}  // namespace horner::attn::kernels

// Attention with a polynomial weight in linear time, on the CPU: quadratic inside a chunk of
// tokens, a state between chunks,
//   S_t = g_t S_{t-1} + phi(k_t) v_t^T   [F, E],   z_t = g_t z_{t-1} + phi(k_t)   [F]
// Segments, each a run of chunks, are tasks of their own: sums over a segment, states at their
// beginnings from those, then every segment by itself. Raw pointers; R is float or double.
#pragma once

#include <cstdint>

#include "attn/math.h"

namespace horner::attn::kernels {

// Monomials of degree p of D variables.
inline int64_t monomials(int64_t D, int64_t p) {
  if (D == 0) return p == 0;
  const int64_t n = D - 1 + p, k = p < D - 1 ? p : D - 1;
  int64_t c = 1;
  for (int64_t i = 1; i <= k; ++i) c = c * (n - k + i) / i;
  return c;
}

inline constexpr int kMostTokens = 256;  // of a chunk

// Tensors are contiguous; E and the rows of q and k, of which D channels count, are padded to
// `width`. Head h of batch b reads key head h / (H / G).
template <class R>
struct Chunked {
  int64_t B, H, G, T, D, width, E;
  int first, last;  // orders
  PolynomialOf<R> weight;
  R scale;                   // what multiplies q.k
  int64_t F;                 // features
  int C;                     // tokens of a chunk, whole vectors
  int64_t segments, length;  // of a segment: whole chunks
  const R *q, *k, *v;        // [B, H, T, width], [B, G, T, width], [B, G, T, E]
  const uint8_t* keep;       // [B, T], or null
  const double* decay;       // [B, G, T], running sums of the log gates, or null
  const R* centre;           // [B, H, T], or null
  const uint8_t* begins;     // [T], whether a packed sequence begins, or null

  R *N, *W;  // [B, H, T, E], [B, H, T]
  // States at the beginning of each segment, and the last: segments + 1 slots, or one in which they
  // follow each other.
  int64_t slots;
  R *S, *z;     // [B, G, slots, F, E], [.., F]
  bool filled;  // whether the first of them may be other than 0
  bool wanted;  // whether the last is

  // Backward. dS and dz: of what S and z hold; the first are not used, and the last are 0 where
  // that state is not wanted.
  const R *dN, *dW;  // [B, H, T, E], [B, H, T]
  R *dS, *dz;
  R *dq, *dk, *dv;  // like q, k, v
  R* d_centre;      // [B, H, T], or null
  double* d_decay;  // [B, G, T], or null
};

template <class R>
struct ChunkedKernels {
  int64_t (*scratch)(const Chunked<R>&);  // numbers that a task needs
  // Tasks: B * G * segments.
  void (*sums)(const Chunked<R>&, int64_t task, R* scratch);     // S, z after a segment from 0
  void (*forward)(const Chunked<R>&, int64_t task, R* scratch);  // from the states; the last state
  void (*backward_sums)(const Chunked<R>&, int64_t task, R* scratch);
  void (*backward)(const Chunked<R>&, int64_t task, R* scratch);
  // Tasks: B * G. The sums of segments become states.
  void (*scan)(const Chunked<R>&, int64_t task);
  void (*backward_scan)(const Chunked<R>&, int64_t task);
};

// One for each instruction set; those above avx512 add nothing here.
#define HORNER_CHUNKED(isa)                           \
  namespace isa {                                     \
  extern const ChunkedKernels<float> chunked_float;   \
  extern const ChunkedKernels<double> chunked_double; \
  }
HORNER_CHUNKED(portable)
HORNER_CHUNKED(avx2)
HORNER_CHUNKED(avx512)
#undef HORNER_CHUNKED

}  // namespace horner::attn::kernels

// One token at a time, on the CPU: the newest query of each head over keys that lie there, and,
// where there is one, through the state of the keys before those. Raw pointers; R is float or
// double.
//   x_s = min(clamp, scale q.k_s - centre),  N = sum_s w(x_s) decay_s in_s v_s + phi(q) S
#pragma once

#include <cstdint>
#include <variant>

#include "attn/math.h"

namespace horner::attn::kernels {

template <class R>
struct Decode {
  int64_t B, H, G, D, width, E;  // rows of q and k have `width` numbers, of which D count
  OneScore<R> weight;
  R clamp, scale;
  const R* q;              // [B, H, width]
  const R* k;              // [B, G, room, width]
  const R* v;              // [B, G, room, E]
  const double* decay;     // [B, G, room], running sums of the log gates, or null
  const R* gate;           // [B, G, room], what multiplies each value, or null
  const uint8_t* keep;     // [B, room], or null
  const R* centre;         // [B, H], or null
  int64_t room, from, to;  // keys from <= s < to

  // The state of earlier keys, from which decay counts: S and z null for none.
  int first, last;  // orders
  int64_t F;
  R *S, *z;  // [B, G, F, E], [B, G, F]; written by fold alone

  R *N, *W, *shift;  // [B, H, E], [B, H], [B, H]: N and W both times e^-shift
};

template <class R>
struct DecodeKernels {
  int64_t (*scratch)(const Decode<R>&);  // numbers that a task needs
  // Tasks: B * G.
  void (*ask)(const Decode<R>&, int64_t task, R* scratch);
  void (*fold)(const Decode<R>&, int64_t task, R* scratch);  // the keys that lie there, into S, z
};

// One for each instruction set, as in chunked_cpu.h.
namespace portable {
extern const DecodeKernels<float> decode_float;
extern const DecodeKernels<double> decode_double;
}  // namespace portable
namespace avx2 {
extern const DecodeKernels<float> decode_float;
extern const DecodeKernels<double> decode_double;
}  // namespace avx2
namespace avx512 {
extern const DecodeKernels<float> decode_float;
extern const DecodeKernels<double> decode_double;
}  // namespace avx512

}  // namespace horner::attn::kernels

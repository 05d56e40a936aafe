// Decoding one token on the CPU: the newest query of each head attends to the keys in the KV cache
// and, if there is one, to the state that holds all earlier keys. R is float or double.
//   x_s = min(clamp, softcap(scale q.k_s) - centre),  N = sum_s w(x_s) decay_s in_s v_s + phi(q) S
// Where keys are near, the last `near` of them have exp for w, of scores that may be of other
// channels.
#pragma once

#include <cstdint>
#include <variant>

#include "attn/math.h"
#include "core/simd/isa.h"

namespace horner::attn::kernels {

template <class R>
struct Decode {
  int64_t B, H, G, D, width, E;  // rows of q and k are padded from D to `width`
  OneScore<R> weight;
  R clamp, scale;
  R softcap;                  // 0: none; on the CPU only, as is `first_keys`
  const R* q;                 // [B, H, width]
  const R* k;                 // [B, G, room, width]
  const R* v;                 // [B, G, room, E]
  const uint16_t *k16, *v16;  // the same in bfloat16, where those are null
  const double* decay;        // [B, G, room], running sums of the log decay gates, or null
  const R* gate;              // [B, G, room], input gates, or null
  const uint8_t* keep;        // [B, room], or null
  const R* centre;            // [B, H], or null
  int64_t room, from, to;     // keys from <= s < to
  int64_t first_keys;         // and keys s < first_keys

  // On the CPU only. The scores are also less the mean score of the far keys, where `keys` is their
  // sum [B, G, D]; `count` [B] is the number of all keys seen, those of the state included.
  const double *count, *keys;
  int64_t near, near_width;
  R near_scale;
  const R *near_q, *near_k;  // [B, H, near_width], [B, G, room, near_width], or null: k
  const R* near_share;       // [H], the weight of the largest near score, or null: e^x

  // The state of earlier keys, at which the sums of `decay` start; S and z are null without one.
  int first, last;  // orders
  int64_t F;
  R *S, *z;  // [B, G, F, E], [B, G, F]; only fold writes them

  R *N, *W, *shift;  // [B, H, E], [B, H], [B, H]: N and W are multiplied by e^-shift
};

template <class R>
struct DecodeKernels {
  int64_t (*scratch)(const Decode<R>&);  // numbers per task
  // Tasks: B * G.
  void (*forward)(const Decode<R>&, int64_t task, R* scratch);
  void (*fold)(const Decode<R>&, int64_t task, R* scratch);  // folds the cached keys into S, z
};

HORNER_PER_ISA(extern const DecodeKernels<float> decode_float;
               extern const DecodeKernels<double> decode_double;)

}  // namespace horner::attn::kernels

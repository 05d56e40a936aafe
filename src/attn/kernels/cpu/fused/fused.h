// Tiled attention on the CPU, for weights that depend on one score only. Forward writes the result
// and, for backward, the sums (N, W) of every row. Backward converts the gradient of the result to
// (dN, dW), row by row, and then to the gradients of q, k and v. One source, compiled once per
// instruction set.
#pragma once

#include <cstdint>

#include "attn/dropout.h"
#include "core/simd/isa.h"

namespace horner::attn::kernels {

inline constexpr int kTile = 64;  // queries and keys per tile
inline constexpr int kPad = 16;   // channels are padded with zeros to a multiple of this
inline constexpr int kMostChannels = 256;

// Weights that depend on one score only.
using Pointwise = OneScore<float>;

// Query t of sequence b sees the keys lo[t] <= s < hi[t + b * per_batch] and, unless they are null,
// from[t] <= s < to[t] <= lo[t]. None decreases with t.
struct SeenKeys {
  const int32_t *lo, *hi, *from, *to;
  int64_t per_batch;
};

// Denominator, gates and norm (epilogue.h). A null pointer means that the stage is absent.
struct Epilogue {
  int64_t channels;  // of the result, without the padding
  bool by_sum;       // Z = max(W + plus + e^sink, least, divisor); otherwise Z is the divisor
  float plus, least;
  bool detach;
  const float *divisor, *out_gate, *post_gate, *sink;  // [B, H, T]
  enum { none, l2, rms, layer } norm;
  bool times_dim;
  float eps;
  const float *norm_weight, *norm_bias;                  // [E]
  float *d_divisor, *d_out_gate, *d_post_gate, *d_sink;  // [B, H, T]
  float *d_norm_weight, *d_norm_bias;                    // [B * H * blocks(T), E]: one row per task
};

// Tensors are float32 and contiguous; D and E are padded. Query head h reads key head h / (H / G).
struct Fused {
  int64_t B, H, G, T, S, D, E;
  Pointwise weight;
  float clamp, scale;
  float softcap;         // 0: none
  int64_t near;          // the newest keys of a query, whose weight is exp; 0: none
  const float* q;        // [B, H, T, D]
  const float* k;        // [B, G, S, D]
  const float* v;        // [B, G, S, E]
  const float* k_tiles;  // [B, G, blocks, D, kTile]: each tile of k transposed; forward only
  // The bfloat16 inputs, as pairs in 32-bit words (core/simd/bf16.h): pairs of neighbours in a row
  // (q, k, v, k_tiles, dN), or of neighbours in a column, kTile / 2 rows per block (*_columns).
  struct {
    const uint32_t *q, *k, *v;  // [B, H, T, D / 2], ...
    const uint32_t* k_tiles;    // [B, G, blocks, D / 2, kTile]; forward only
    const uint32_t* v_columns;  // [B, G, blocks, kTile / 2, E]; forward only
    const uint32_t* q_columns;  // [B, H, blocks, kTile / 2, D]; backward only
    uint32_t *dN, *dN_columns;  // [B, H, T, E / 2], [B, H, blocks, kTile / 2, E]
  } pairs;
  const float* in_gate;       // [B, G, S], or null
  const float* centre;        // [B, H, T], or null
  const double* decay;        // [B, G, S], running sums of the log decay gates, or null
  const double* query_decay;  // [B, G, T], those of the queries; null: of the keys at their places
  SeenKeys seen;
  // [B or 1, H or 1, T, S], or null: sequence b and head h at b * bias_batch + h * bias_head
  const float* bias;
  int64_t bias_batch, bias_head;
  const uint8_t* keep;  // [B, S], or null
  Dropout dropout;

  Epilogue epilogue;

  // Forward writes o, and N, W and shift, which backward reads, unless they are null.
  float* o;              // [B, H, T, E]
  float* statistics;     // [4, B, H, T] (statistics.h), or null
  float *N, *W, *shift;  // [B, H, T, E], [B, H, T], [B, H, T]

  // Backward. Keys and queries are divided into `parts`. In round r, part p of the keys is paired
  // with part p + r of the queries, so no two tasks of a round add to the same numbers, and the
  // rounds fix the order of the sums.
  int64_t parts;
  const float* d_o;                     // [B, H, T, E]
  float *dN, *dW;                       // [B, H, T, E] (null for pairs), [B, H, T]
  float *dq, *dk, *dv;                  // [B, H, T, D], [B, G, S, D], [B, G, S, E]
  float *d_in_gate, *d_centre;          // [B, G, S], [B, H, T] (starts at zero), or null
  double *d_decay_query, *d_decay_key;  // [B, H, T], [B, G, S]; start at zero, or null
  float* d_bias;                        // like bias; starts at zero, or null
};

inline int64_t blocks(int64_t n) {
  return (n + kTile - 1) / kTile;
}

// x [rows, C] -> tiles [blocks, C, kTile], each transposed, padded with zeros.
struct Transpose {
  const float* x;
  float* tiles;
  int64_t rows, C;
};

// x [rows, C], bfloat16 -> blocks [kTile / 2, C] of pairs of neighbours in a column.
struct PairColumns {
  const uint16_t* x;
  uint32_t* pairs;
  int64_t rows, C;
};

struct FusedKernels {
  void (*transpose)(const Transpose&, int64_t block);
  void (*pair_columns)(const PairColumns&, int64_t block);  // bfloat16 kernels only
  void (*forward)(const Fused&, int64_t task);              // tasks: B * H * blocks(T)
  void (*rows)(const Fused&, int64_t task);  // tasks: B * H * blocks(T); runs before backward
  void (*backward)(const Fused&, int64_t round,
                   int64_t task);  // tasks: B * G * parts in each round
};

// fused_bf16_kernels, in avx512_bf16 and amx only, take bfloat16 inputs.
HORNER_PER_ISA(extern const FusedKernels fused_kernels, fused_bf16_kernels;)

}  // namespace horner::attn::kernels

// Attention on the CPU for weights or a sharpness that depend on the whole row: one block of
// queries at a time, with its strip of scores [kStrip, keys seen]. Forward writes the sums (N, W)
// and the threshold of every row; backward reads (dN, dW).
#pragma once

#include "attn/kernels/cpu/fused/fused.h"

namespace horner::attn::kernels {

inline constexpr int kStrip = 32;  // queries per block

// Weights of one score are here for a sharpness that depends on the row.
using RowWeight = decltype(joined(OneScore<float>(), WholeRow()));

// What the weights of a row depend on.
struct RowThreshold {
  float beta;  // sharpness: multiplies the scores
  float top;   // the largest score, or 0; Softpick: not below 0; NaN if a score is NaN or +inf
  float cut;   // Entmax: tau; TopK: the smallest score kept; SelfAdjusted: min(x, 0) over the row
  float sum;   // Entmax: sum p^(2 - alpha); TopK, SelfAdjusted: sum e^(x - top)
};

// Tensors are float32 and contiguous; D and E are padded. Query head h reads key head h / (H / G).
struct Rows {
  int64_t B, H, G, T, S, D, E;
  RowWeight weight;
  bool adaptive, centred;
  float clamp, softcap;  // 0: none
  const float* q;        // [B, H, T, D]
  const float* scale;    // [B, H, T]: multiplies the products
  const float* scaled;   // [B, H, T, D]: q * scale; backward only
  const float* k;        // [B, G, S, D]
  const float* v;        // [B, G, S, E]
  const float* k_tiles;  // [B, G, blocks, D, kTile]: each tile of k transposed, padded with zeros
  const float* v_tiles;  // [B, G, blocks, E, kTile]; backward only
  const double* decay;   // [B, G, S], running sums of the log decay gates, or null
  SeenKeys seen;
  const float* bias;  // as in Fused, or null
  int64_t bias_batch, bias_head;
  const uint8_t* keep;  // [B, S], or null
  Dropout dropout;
  int64_t stride;  // floats per row of a strip: the widest row plus kTile

  // Forward.
  float *N, *W;              // [B, H, T, E], [B, H, T]
  RowThreshold* thresholds;  // [B, H, T]; backward reads it
  float* statistics;         // [4, B, H, T] (statistics.h), or null

  // Backward. Each part of the queries has its own dk and dv, which the caller sums.
  int64_t parts;
  const float *dN, *dW;                 // [B, H, T, E], [B, H, T]
  float *dq, *dk, *dv;                  // [B, H, T, D], [parts, B, G, S, D], [parts, B, G, S, E]
  double *d_decay_query, *d_decay_key;  // [B, H, T], [parts, B, G, S], or null
  float* d_bias;                        // like bias; starts at zero, or null
};

struct RowKernels {
  // `scratch`: (2 * kStrip + 2) * stride floats, one buffer per thread.
  void (*forward)(const Rows&, int64_t task, float* scratch);   // tasks: B * H * blocks of queries
  void (*backward)(const Rows&, int64_t task, float* scratch);  // tasks: B * G * parts
};

HORNER_PER_ISA(extern const RowKernels row_kernels;)

}  // namespace horner::attn::kernels

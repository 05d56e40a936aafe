// The T x S work on the CPU of those variants whose weights need the whole row: a block of queries
// at a time, with its strip of scores [kStrip, keys seen]. Forward gives the sums (N, W) of every
// row and what the weights needed to know of it, backward takes (dN, dW). Raw pointers, as in
// fused_cpu.h.
#pragma once

#include "attn/kernels/cpu/fused/fused.h"

namespace horner::attn::kernels {

inline constexpr int kStrip = 32;  // queries of a block

// Those of one score are here for the sharpness that needs the row.
using RowWeight = std::variant<Exp, Sigmoid, Polynomial, Entmax, TopK, SelfAdjusted>;

// What the weights of a row need to know of it.
struct Found {
  float beta;  // what the sharpness multiplies the scores by
  float top;   // the largest score, or 0; NaN where a score is not finite
  float cut;   // Entmax: tau; TopK: the least score kept; SelfAdjusted: min(x, 0) over the row
  float sum;   // Entmax: of p^(2 - alpha); TopK, SelfAdjusted: of e^(x - top)
};

// Tensors are float32 and contiguous; D and E are padded. Head h of batch b reads key head h / (H /
// G).
struct Rows {
  int64_t B, H, G, T, S, D, E;
  RowWeight weight;
  bool adaptive, centred;
  float clamp;
  const float* q;          // [B, H, T, D]
  const float* scale;      // [B, H, T]: what multiplies the products
  const float* scaled;     // [B, H, T, D]: q times it; backward alone
  const float* k;          // [B, G, S, D]
  const float* v;          // [B, G, S, E]
  const float* k_tiles;    // [B, G, blocks, D, kTile]: each tile of k transposed, zeros beyond S
  const float* v_tiles;    // [B, G, blocks, E, kTile]; backward alone
  const double* decay;     // [B, G, S], running sums of the log gates, or null
  const int32_t *lo, *hi;  // [T]: query t sees keys lo <= s < hi; neither decreases with t
  const uint8_t* keep;     // [B, S], or null
  int64_t stride;          // floats between the rows of a strip: the widest, and kTile more

  // Forward.
  float *N, *W;       // [B, H, T, E], [B, H, T]
  Found* found;       // [B, H, T]; backward reads it
  float* statistics;  // [4, B, H, T] (statistics.h), or null

  // Backward. Each part of the queries has its own dk and dv; the caller adds those up.
  int64_t parts;
  const float *dN, *dW;                 // [B, H, T, E], [B, H, T]
  float *dq, *dk, *dv;                  // [B, H, T, D], [parts, B, G, S, D], [parts, B, G, S, E]
  double *d_decay_query, *d_decay_key;  // [B, H, T], [parts, B, G, S], or null
};

struct RowKernels {
  // `scratch`: 2 * kStrip * stride floats of the caller's thread.
  void (*forward)(const Rows&, int64_t task, float* scratch);   // tasks: B * H * blocks of queries
  void (*backward)(const Rows&, int64_t task, float* scratch);  // tasks: B * G * parts
};

// One for each instruction set.
namespace portable {
extern const RowKernels row_kernels;
}
namespace avx2 {
extern const RowKernels row_kernels;
}
namespace avx512 {
extern const RowKernels row_kernels;
}
namespace amx {
extern const RowKernels row_kernels;
}
namespace avx512_bf16 {
extern const RowKernels row_kernels;
}

}  // namespace horner::attn::kernels

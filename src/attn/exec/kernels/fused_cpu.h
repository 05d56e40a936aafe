// The T x S work of a variant on the CPU, in tiles: forward gives the sums (N, W) of every row,
// backward takes (dN, dW). Raw pointers: no torch header in this folder.
// One source, compiled once per instruction set.
#pragma once

#include <cstdint>

#include "attn/math.h"

namespace horner::attn::kernels {

inline constexpr int kTile = 64;       // queries and keys of a tile
inline constexpr int kPad = 16;        // channels are padded with zeros to a multiple of this
inline constexpr int kMostChannels = 256;

// Weights of one score.
using Pointwise = std::variant<Exp, Sigmoid, Polynomial>;

// Tensors are float32 and contiguous; D and E are padded. Head h of batch b reads key head h / (H / G).
struct Fused {
  int64_t B, H, G, T, S, D, E;
  Pointwise weight;
  float clamp;
  const float* q;        // [B, H, T, D]
  const float* k;        // [B, G, S, D], scaled
  const float* v;        // [B, G, S, E]
  const float* k_tiles;  // [B, G, blocks, D, kTile]: each tile of k transposed, zeros beyond S
  const float* v_tiles;  // [B, G, blocks, E, kTile]; backward alone
  const float* centre;   // [B, H, T], or null
  const double* decay;   // [B, G, S], running sums of the log gates, or null
  const int32_t *lo, *hi;  // [T]: query t sees keys lo <= s < hi; neither decreases with t
  const uint8_t* keep;     // [B, S], or null

  // Forward.
  float *N, *W, *shift;  // [B, H, T, E], [B, H, T], [B, H, T]

  // Backward. `shift` is read. Each part of the keys adds to its own dq; the caller adds those up.
  int64_t parts;
  const float *dN, *dW;               // [B, H, T, E], [B, H, T]
  float *dq, *dk, *dv;                // [parts, B, H, T, D], [B, G, S, D], [B, G, S, E]
  float *d_centre;                    // [parts, B, H, T], or null
  double *d_decay_query, *d_decay_key;  // [parts, B, H, T], [B, G, S], or null
};

inline int64_t blocks(int64_t n) {
  return (n + kTile - 1) / kTile;
}

// x [rows, C] in tiles [blocks, C, kTile], each transposed.
struct Transpose {
  const float* x;
  float* tiles;
  int64_t rows, C;
};

struct FusedKernels {
  void (*transpose)(const Transpose&, int64_t block);
  void (*forward)(const Fused&, int64_t task);   // tasks: B * H * blocks(T)
  void (*backward)(const Fused&, int64_t task);  // tasks: B * G * parts
};

// One for each instruction set.
namespace portable { extern const FusedKernels fused_kernels; }
namespace avx2 { extern const FusedKernels fused_kernels; }
namespace avx512 { extern const FusedKernels fused_kernels; }

}  // namespace horner::attn::kernels

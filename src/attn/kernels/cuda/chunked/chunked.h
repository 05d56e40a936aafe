// Attention with a weight of order 1 or 2 in linear time, on an NVIDIA GPU: scores within a chunk
// of tokens, states of monomial features phi (made in registers) between chunks,
//   S = sum_s phi(k_s) v_s^T,  z = sum_s phi(k_s),   N_t += phi(q_t) S,  W_t += phi(q_t) z
// First the sums of every chunk, then a scan of states, then every chunk independently. Backward
// does the same from the end: queries add phi(q_t) dN_t^T, which is applied to the keys before
// them. Raw pointers and a stream.
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

// w(x) = c0 + c1 x + c2 x^2
struct Quadratic {
  float c[3];
};

inline constexpr int kMaxChunkedChannels = 64;
inline constexpr int kChunkUnit = 128;           // tokens; chunks are a multiple of this
inline constexpr int kTileSums = 16 * (64 + 1);  // per tile: S [16, 64], z [16]
inline constexpr int kConstantSums = 72;         // order 0: S [64], z [1], unused
inline constexpr int kTileColumn = 16;           // words of z per tile: float32, or bf16 high
                                                 // parts, then low parts

// One record per key head and chunk, times the coefficients of the weight. If `scans()`: without
// coefficients, z in float32, and summed from the boundary of a segment (scan_states.cuh); the
// state at that boundary is in `segments`. Tiles hold 16 monomials: x_j of a block of 16 channels,
// or x_i x_j with one i, whose block is not after that of j.
struct ChunkStates {
  void* S;          // [tiles, 16, 64], in the inputs' dtype
  uint32_t* z;      // [tiles, kTileColumn]
  float* constant;  // [kConstantSums]
  float* segments;  // [B, G, segments, tiles + 1, kTileSums], or null
};

struct Chunks {
  Fused f;  // T = S, causal mask, no clamp or centre
  Quadratic w;
  int length;          // tokens per chunk
  int segment;         // chunks per segment, if scans()
  bool relu;           // of q and k, if scans(); otherwise they arrive mapped
  ChunkStates prefix;  // of the keys before each chunk
  ChunkStates suffix;  // of the queries after each chunk
  float* sums;         // [B, G, chunks, tiles, 16], scratch for z in chunk_states
  // [B, G, chunks], zero-initialised, where the decay has a gradient: that of the gate after each
  // chunk, from the states on both sides. f.d_decay_query and f.d_decay_key give the others.
  double* d_after;

  HORNER_HD int blocks() const { return (f.D + 15) / 16; }
  HORNER_HD int tiles() const {
    return blocks() + (w.c[2] != 0 ? 8 * blocks() * (blocks() + 1) : 0);
  }
  HORNER_HD int chunks() const { return (f.T + length - 1) / length; }
  HORNER_HD int segments() const { return (chunks() + segment - 1) / segment; }
  HORNER_HD bool scans() const {
    return w.c[2] == 0 && f.dtype == Dtype::bfloat16 && length == kChunkUnit;
  }
  int64_t records() const { return int64_t(f.B) * f.G * chunks(); }
};

int chunk_shared_memory();  // bytes, the most of any kernel

// Each throws core/check.h's Error on failure. Between `chunk_forward` and the rest,
// `row_gradients` (fused/fused.h) turns the gradient of the result into that of the sums.
void chunk_states(const Chunks&, bool of_queries, Stream);  // `prefix`, or `suffix`
void chunk_forward(const Chunks&, Stream);
// If `scans()`, chunk_backward_keys computes dq, dk and dv together, from prefix and suffix.
// Otherwise dq needs only prefix, dk and dv only suffix: without d_after, the two may share memory.
void chunk_backward_queries(const Chunks&, Stream);
void chunk_backward_keys(const Chunks&, Stream);

// The same for one dtype.
template <class T>
struct ChunkedLaunch {
  static int shared_memory();
  static void states(const Chunks&, bool of_queries, Stream);
  static void forward(const Chunks&, Stream);
  static void backward_queries(const Chunks&, Stream);
  static void backward_keys(const Chunks&, Stream);
};

}  // namespace horner::attn::kernels::cuda

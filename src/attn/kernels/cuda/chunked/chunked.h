// Attention with a weight of order 1 or 2 in linear time, on an NVIDIA GPU: scores inside a chunk
// of tokens, sums over monomials of the keys between chunks,
//   S = sum_s phi(k_s) v_s^T,  z = sum_s phi(k_s),   N_t += phi(q_t) S,  W_t += phi(q_t) z
// First the sums of every chunk, then from those the state before each, then every chunk by itself.
// Backward the same from the end: queries leave phi(q_t) dN_t^T, which the keys before them ask.
// The monomials are made in registers. Raw pointers and a stream.
//
// They lie in tiles of sixteen, for one block of sixteen channels: x_j, or x_i x_j with one i. Of
// two blocks only the pairs whose first is not behind the second are there.
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

// w(x) = c0 + c1 x + c2 x^2
struct Quadratic {
  float c[3];
};

inline constexpr int kMaxChunkedChannels = 64;
inline constexpr int kChunkUnit = 128;           // chunks are a multiple of this, in tokens
inline constexpr int kTileSums = 16 * (64 + 1);  // of a tile: [16, 64] of S, [16] of z
inline constexpr int kConstantSums = 72;         // of order 0: [64] of S, one of z, unused
inline constexpr int kTileColumn = 16;           // words of z of a tile: float32, or bfloat16
                                                 // numbers and what they have lost

// One record for each key head and chunk, with the coefficients of the weight in it. Of a walk
// (walk.cuh): without coefficients, z in float32, counted from the beginning of a segment; what was
// before that is in `segments`.
struct ChunkStates {
  void* S;          // [tiles, 16, 64], in the inputs' dtype
  uint32_t* z;      // [tiles, kTileColumn]
  float* constant;  // [kConstantSums]
  float* segments;  // [B, G, segments, tiles + 1, kTileSums], or null
};

struct Chunks {
  Fused f;  // T = S, a causal mask; no clamp or centre
  Quadratic w;
  int length;          // tokens of a chunk
  int segment;         // chunks of a segment, of a walk
  bool relu;           // of q and k, in a walk; otherwise they come mapped
  ChunkStates prefix;  // of the keys before each chunk
  ChunkStates suffix;  // of the queries after each chunk
  float* sums;         // [B, G, chunks, tiles, 16], of z, for the time of `states`

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

int chunk_shared_memory();  // the most that a block of threads wants, in bytes

// Each throws core/check.h's Error where the GPU refuses. Between `forward` and the rest,
// `row_gradients` of fused_cuda.h takes the gradient of the result to that of the sums.
void chunk_states(const Chunks&, bool of_queries, Stream);  // `prefix`, or `suffix`
void chunk_forward(const Chunks&, Stream);
// A walk takes dq, dk and dv in one step, from both kinds of states (chunk_backward_keys);
// otherwise dq wants those before each chunk, dk and dv those behind: the memory of the first can
// be that of the second.
void chunk_backward_queries(const Chunks&, Stream);
void chunk_backward_keys(const Chunks&, Stream);

// The same of one dtype.
template <class T>
struct ChunkedLaunch {
  static int shared_memory();
  static void states(const Chunks&, bool of_queries, Stream);
  static void forward(const Chunks&, Stream);
  static void backward_queries(const Chunks&, Stream);
  static void backward_keys(const Chunks&, Stream);
};

}  // namespace horner::attn::kernels::cuda

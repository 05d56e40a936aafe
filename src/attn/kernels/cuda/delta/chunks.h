// The delta rule in chunks of 64 tokens on the tensor cores of an NVIDIA GPU, in bfloat16, with
// gates of tokens, of channels or without; gates of channels also without it. With b the running
// sums of the log gates in a chunk, L_ij = scale k_i.k_j e^(b_i - b_j) for j < i, and S the state
// before the chunk:
//   rest = (1 + L share)^-1 (v - scale e^b k S),   u = share rest
//   S'   = e^(b_C) S + (e^(b_C - b) k)^T u
//   N_i  = scale e^(b_i) q_i S + scale sum_{j <= i} q_i.k_j e^(b_i - b_j) u_j
// The first and the last line are of every chunk on its own, but for S; only `scan` goes from chunk
// to chunk. Backward is the same in reverse. Raw pointers and a stream.
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

inline constexpr int kChunkTokens = 64;

// A state before the tokens, or null for none, and where that after them goes, or null: [B, G, D,
// row], float32 or double. They are not the same memory. Query heads h of H / G share one.
struct StateMemory {
  const void* before;
  void* after;
  int G, D, E, row;
  bool in_double;

  HORNER_HD int64_t place(int64_t head, int d, int e) const { return (head * D + d) * row + e; }
};

// A record is one chunk of one head. The matrices of a record are bfloat16, except where a float
// pointer says otherwise; `fragments` are in the order in which threads hold them.
struct DeltaChunks {
  int B, H, T;
  int C;                      // channels of queries, keys and values: 64 or 128
  float scale, most;          // share_t = most beta_t / (scale k_t.k_t), 0 for a key of 0
  View q, k, v;               // [B, H, T, C]
  const float* beta;          // [B, H, T], or null: u = v
  const float* logs;          // [B, H, T] of the gates, or null
  TypedPointer channel_logs;  // [B, H, T, C] instead, or null
  void* N;                    // [B, H, T, C]
  StateMemory state;          // before and after the tokens

  // Of each record.
  float *share, *own, *sums;  // [64]: u / rest, scale k.k, the running sums b
  void* taken;                // [C, 64]: -(1 + L share)^-1 scale e^b k, transposed
  float* given;               // fragments: (1 + L share)^-1 v, transposed
  float *factor, *left;       // [64], [1] or [C]: of the values that enter the state; e^(b_C)
  void *S, *rest;             // [C, C], [C, 64]: the state before the chunk and rest, transposed
  // With gates of channels: b [64, C], scale e^b q, e^(b_C - b) k, scale e^b k, all [64, C].
  float* channel_sums;
  void *q_from_start, *k_to_end, *k_from_start;

  // Backward.
  View dN;
  void* d_taken;                // [C, 64]
  float *d_given, *d_factor;    // fragments, [64]
  void* d_state;                // fragments: what the chunk's queries add to the state's gradient
  void *dS, *dv_t;              // [C, C], [C, 64]: the gradients of the state after it and of v
  void *dq, *dk, *dv;           // [B, H, T, C]
  float *d_beta, *d_logs;       // [B, H, T]
  TypedPointer d_channel_logs;  // [B, H, T, C]

  HORNER_HD int chunks() const { return (T + kChunkTokens - 1) / kChunkTokens; }
  HORNER_HD int64_t records() const { return int64_t(B) * H * chunks(); }
};

int delta_shared_memory(int C, bool channels, bool corrected);  // bytes, the most of any kernel

// Each throws core/check.h's Error on failure.
void delta_forward(const DeltaChunks&, Stream);
void delta_backward(const DeltaChunks&, Stream);

}  // namespace horner::attn::kernels::cuda

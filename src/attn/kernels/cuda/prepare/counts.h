// What a row has of the keys that it sees, other than its weights, on an NVIDIA GPU.
//   CumulativeGate: Z_t = max(sum of e^gate over the keys seen, least), times their number or not
//   decay: c_s, the log gates of the tokens up to s
//   LogLength: scale s_h log n_t, and CountPower: n_t^sigmoid(m_h), n_t the number of keys seen
// Sums over intervals are differences of running sums, in double.
#pragma once

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

struct GateSums {
  int B, H, G;
  Seen seen;
  TypedPointer gates;  // [B, G, S]
  float least;
  bool times_count;
  double* scratch;         // [B, G, gate_scratch()]
  float* divisor;          // [B, H, T]
  const float* d_divisor;  // likewise, of backward
  TypedPointer d_gates;    // [B, G, S]
};
HORNER_HD bool counts_keys(const GateSums& p) {
  return p.times_count && p.seen.keep;
}
// Sums over keys; where they are counted, their numbers; in backward, sums over queries.
HORNER_HD int64_t gate_scratch(const GateSums& p) {
  return int64_t(p.seen.S + 1) * (counts_keys(p) ? 2 : 1) + (p.d_divisor ? p.seen.T + 1 : 0);
}

// Heads are taken in parts, all of them at once.
inline constexpr int kDecayPart = 4096;  // tokens
struct DecaySums {
  int B, G, S;
  TypedPointer gates;    // [B, G, S]
  double* sums;          // likewise
  const double* d_sums;  // likewise, of backward
  TypedPointer d_gates;
  double* scratch;  // [B, G, parts()]

  HORNER_HD int parts() const { return (S + kDecayPart - 1) / kDecayPart; }
};

// A learned number of each head and the number of keys. No key is hidden by `keep`.
struct CountedRows {
  enum Kind { log_length, count_power } kind;
  int B, H;
  Seen seen;
  TypedPointer learned;    // [H]
  float scale;             // of log_length
  float* value;            // [B, H, T]
  const float* d_value;    // likewise, of backward
  TypedPointer d_learned;  // [H]
};

// Each throws core/check.h's Error where the GPU refuses.
void gate_divisor(const GateSums&, Stream);
void gate_divisor_backward(const GateSums&, Stream);
void decay_sums(const DecaySums&, Stream);
void decay_sums_backward(const DecaySums&, Stream);
void counted_rows(const CountedRows&, Stream);
void counted_rows_backward(const CountedRows&, Stream);

}  // namespace horner::attn::kernels::cuda

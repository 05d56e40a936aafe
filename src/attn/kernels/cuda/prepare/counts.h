// Row values from the keys that a row sees, other than its weights, on an NVIDIA GPU.
//   CumulativeGate: Z_t = max(sum of e^gate over keys seen, least), optionally times their count
//   decay: c_s, the running sum of the log gates up to token s; NaN where a gate between is NaN
//   LogLength: scale s_h log n_t, n_t the number of keys seen
// Interval sums are differences of running sums, in double.
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
  const float* d_divisor;  // likewise, backward only
  TypedPointer d_gates;    // [B, G, S]
};
HORNER_HD bool counts_keys(const GateSums& p) {
  return p.times_count && p.seen.keep;
}
// Prefix sums over keys; prefix counts if keys are counted; backward: prefix sums over queries.
HORNER_HD int64_t gate_scratch(const GateSums& p) {
  return int64_t(p.seen.S + 1) * (counts_keys(p) ? 2 : 1) + (p.d_divisor ? p.seen.T + 1 : 0);
}

// A head is split into parts that run in parallel.
struct DecaySums {
  int B, G, S;
  int part = 4096;     // tokens
  TypedPointer gates;  // [B, G, S]
  bool skips_nan;      // a NaN counts as 0, and `spoil_rows` follows
  double* sums;        // likewise
  double* scratch;     // [B, G, parts()]
  // Backward: d_gates from the gradients of the sums at the keys and at the queries.
  int H, T;
  const double* d_key;  // [B, G, S]
  const void* d_query;  // [B, H, T], double if `is_double`, else float
  bool is_double;
  const double* d_after;  // [B, G, parts()]: d_gates of the token after each part; or null: summed
  TypedPointer d_gates;   // [B, G, S]

  HORNER_HD int parts() const { return (S + part - 1) / part; }
};

// The sums would carry a NaN to every later token, and between any two of those it is not. Sets to
// NaN the rows that see a key before a gate that is NaN. One thread block per key head, which
// returns at once if none is.
struct SpoiledRows {
  static constexpr int kMost = 12;
  struct Rows {
    TypedPointer x;  // [B, H, T, channels], or null
    int channels;
    bool by_last;  // all rows of a head as its last
  };
  int B, H, G;
  Seen seen;
  SeenLists lists;
  TypedPointer gates;  // [B, G, S]
  int* counts;         // [B, G, S], scratch
  Rows rows[kMost];
};

// scale s_h log n. `keep` must hide no key.
struct CountedRows {
  int B, H;
  Seen seen;
  TypedPointer learned;  // [H], or null: 1
  float scale;
  float* value;            // [B, H, T]
  const float* d_value;    // likewise, backward only
  TypedPointer d_learned;  // [H]
};

// Each throws core/check.h's Error if a launch fails.
void gate_divisor(const GateSums&, Stream);
void gate_divisor_backward(const GateSums&, Stream);
void decay_sums(const DecaySums&, Stream);
void decay_sums_backward(const DecaySums&, Stream);
void spoil_rows(const SpoiledRows&, Stream);
void counted_rows(const CountedRows&, Stream);
void counted_rows_backward(const CountedRows&, Stream);

}  // namespace horner::attn::kernels::cuda

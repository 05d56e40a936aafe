// The attention problem that all CUDA kernels share. Forward computes the result and the row values
// that backward needs (W, shift, r and the normalised row u). Backward first maps the result's
// gradient row by row to the gradients of the sums (dN = a g and dW), then those to q, k, v. Raw
// pointers and a stream: no torch header in this folder.
#pragma once

#include <climits>
#include <cstdint>

#include "attn/math.h"

struct CUstream_st;

namespace horner::attn::kernels::cuda {

using Stream = CUstream_st*;

enum class Dtype { bfloat16, float16, float32 };

inline constexpr int kMaxChannels = 256;
inline constexpr int kPad = 8;         // channels are zero-padded to a multiple of this
inline constexpr int kAlignment = 16;  // bytes: row alignment of q, k, v and the gradient

// A tensor [B, heads, rows, channels] of the problem's dtype; channels contiguous, strides in
// elements.
struct View {
  void* at;
  int64_t batch, head, row;
};

// Per-row statistics for weights that depend on the whole row.
struct RowThreshold {
  float top;        // largest score; 0 without keys, NaN if a score is not finite. Softpick: >= 0
  float threshold;  // Entmax: tau; TopK: between the last kept and the next; SelfAdjusted: min
  float inv_sum;    // TopK, SelfAdjusted: 1 / sum of e^(x - top)
  float beta;       // Adaptive: factor of the scores
};
// Sums shared by the gradients of such a row (weights.cuh). Entmax: the mean of the weights'
// gradients, `dot` and what is left of it in double, so that score gradients add up to 0: they
// multiply large scores in the gradient of a factor.
struct RowGradientSums {
  float dot, at_min, at_max, rest;
};

// Less common weights, selected at run time: one kernel that branches.
struct RuntimeWeight {
  enum Kind { sigmoid, entmax, top_k, self_adjusted, softpick } kind;
  float alpha;  // Entmax
  int k;        // TopK
  bool renormalise;
};
using Weights = std::variant<Exp, Polynomial, RuntimeWeight>;

// The keys that query t sees: an interval whose bounds never decrease with t, minus `keep`.
struct Seen {
  int T, S;
  bool causal;                 // no key further than `ahead` after the query's own
  int window = INT_MAX;        // keys, including the query's own
  int ahead = 0;               // with `causal`; at most S + T
  int chunk = 0;               // keys of a chunk, of which a query sees its own; 0: no chunks
  const int32_t *begin, *end;  // [T]: bounds of the token's packed sequence, or null
  const uint8_t* keep;         // [B, S], or null

  HORNER_HD int lo(int t) const {
    const int p = t + S - T + 1;
    const int from = begin ? begin[t] : 0;
    int at = window < p ? p - window : 0;
    if (chunk && p > from) at = from + (p - 1 - from) / chunk * chunk;
    return from > at ? from : at;
  }
  HORNER_HD int hi(int t) const {
    const int p = t + S - T + 1 + ahead, at = !causal || p > S ? S : p > 0 ? p : 0;
    return end && end[t] < at ? end[t] : at;
  }
  // The queries that see some key of [s0, s1): [first_query, end_query).
  HORNER_HD int first_query(int s0) const {
    const int at = causal && s0 - ahead > S - T ? s0 - ahead - (S - T) : 0;
    return begin && begin[s0] > at ? begin[s0] : at;
  }
  HORNER_HD int end_query(int s1) const {
    const int s = s1 - 1, from = begin ? begin[s] : 0;
    int64_t past = int64_t(s) + window - (S - T);
    if (chunk) past = from + ((s - from) / chunk + 1) * int64_t(chunk) - (S - T);
    const int at = past < 0 ? 0 : past < T ? int(past) : T;
    return end && end[s1 - 1] < at ? end[s1 - 1] : at;
  }
};

// The keys of each query where they are not the interval of Seen, and the queries of each key. None
// decreases with t, nor first_query with s.
struct SeenLists {
  const int32_t *lo, *hi;      // [T]: lo <= s < hi; null: Seen has them
  const int32_t *from, *to;    // [T]: and from <= s < to, to <= lo; null: no others
  const int32_t* first_query;  // [S]: first <= t < end
  const int32_t* end_query;    // [S]
  int hi_batch, first_batch;   // strides of hi and first_query, 0 where all sequences share one
};

// Dropout (attn/dropout.h). The seed stays on the device; null: nothing is dropped.
struct DroppedPairs {
  const int64_t* seed;
  uint32_t below;
  float kept = 1;
};

// A pointer to elements of any dtype, or null.
struct TypedPointer {
  void* at;
  Dtype dtype;

  HORNER_HD explicit operator bool() const { return at != nullptr; }
#ifdef __CUDACC__
  __device__ float operator[](int64_t i) const;  // in epilogue.cuh
  __device__ void set(int64_t i, float) const;
#endif
};

// Denominator, gates and norm. A null pointer disables its stage.
struct Epilogue {
  bool by_sum;  // Z = max(W + plus + e^sink, least, floor n); otherwise Z is the divisor
  float plus, least, floor;
  bool by_count;  // the divisor is the number of keys that a query sees in `counted`
  Seen counted;
  bool detach;
  const float* divisor;              // [B, H, T]; with a floor, n where keys are hidden
  const float* sink;                 // [B, H, T], with by_sum: Z has e^sink more
  TypedPointer out_gate, post_gate;  // likewise
  enum Norm { none, l2, rms, layer } norm;
  bool times_dim;
  float eps;
  const float *norm_weight, *norm_bias;  // [E]
  float *d_divisor, *d_sink;             // [B, H, T]
  TypedPointer d_out_gate, d_post_gate;  // likewise
  float* d_norm;                         // [2, E]: gradients of weight and bias
  float* d_norm_parts;                   // [row_blocks(), 2, E]
};

// Per-query constants of backward: z = scale q.k - sub, weight w(min(z, limit)), dN = a g. For Exp,
// z and limit are in units of ln 2, and in 16-bit problems `sub` too.
struct Query {
  float sub, limit, a, dW;
};
constexpr float unit_of_sub(bool is_exp, bool is_float32) {
  return is_exp && !is_float32 ? 1.4426950408889634f : 1;
}

// Head h of batch b reads key head h / (H / G). D and E are padded.
struct Fused {
  int B, H, G, T, S, D, E;
  int channels;  // of the result, without padding
  Dtype dtype;
  float scale, clamp;  // scale > 0
  View q, k, v;
  float softcap;                  // a score is softcap tanh(scale q.k / softcap); 0: scale q.k
  const float* bias;              // [B, H, T, S], added to it, or null
  int64_t bias_batch, bias_head;  // strides, 0 where all share one; likewise those of d_bias
  const float* centre;            // [B, H, T], subtracted from the scores of a row; or null
  const double* decay;            // [B, G, S], running sums of the log gates, or null
  bool decay_in_scores;  // Exp: log decay is added to the scores, so that a shift includes it
  const float* gate;     // [B, G, S], factor of the values, or null
  Seen seen;
  Epilogue epilogue;
  RowThreshold* thresholds;  // [B, H, T], for RuntimeWeight and Adaptive

  // Forward.
  void* o;  // [B, H, T, E]
  void* u;  // [B, H, T, E], the normalised row before weight, bias and post; or null
  // float16: what rounding took from u (or from o, where u is null), times 2^11; or null.
  void* rest;            // [B, H, T, E]
  float *W, *shift, *r;  // [B, H, T], or null
  float* mean;           // [B, H, T]: LayerNorm, r times the mean it subtracted; or null
  float* statistics;     // [4, B, H, T]: entropy, largest, first, negative
  float* abs_sum;        // [B, H, T], with statistics: the sum of |w|, times e^-shift; or null

  // Backward.
  View d_o;                        // gradient of the result
  void* g;                         // [B, H, T, E], or null: d_o is used
  Query* queries;                  // [B, H, T]
  RowGradientSums* gradient_sums;  // [B, H, T], for RuntimeWeight
  // Accumulated atomically; null: `fused_dq` writes dq. Each head has whole tiles of `dq_rows`
  // rows, `dq_row` floats each. `row_gradients` clears it. With kDqTile rows it is in fragment
  // order, [tile][dq_row / 8][thread][4], and unscaled: `unpack_dq` converts it to dq.
  float* dq_sum;
  int dq_rows, dq_row;
  void* dq;         // [B, H, T, D]
  void *dk, *dv;    // [B, G, S, D], [B, G, S, E]
  float* d_centre;  // [B, H, T], zero-initialised, or null if the centre is a constant
  float* d_bias;    // [B, H, T, S], zero-initialised, or null if the bias is a constant
  int64_t d_bias_batch, d_bias_head;
  // The weights times their gradients, summed over keys [B, H, T] (zero-initialised; double in
  // float32, else float) and over queries, negated, [B, G, S]; or null if the decay is a constant.
  // A gate's gradient is the difference of many of both, so they sum the same numbers: rounding
  // that differed between the two would add up over the tokens.
  void* d_decay_query;
  double* d_decay_key;
  float* d_gate;  // [B, G, S], zero-initialised, if there is a gate

  // What only the special kernels have (special.cuh).
  SeenLists lists;
  DroppedPairs dropout;
};
HORNER_HD bool is_special(const Fused& f) {
  return f.lists.lo || f.dropout.seed;
}

// Whether scores are more than scale q.k less a centre. The clamp then comes before the decay, and
// no other follows.
HORNER_HD bool changes_scores(const Fused& f) {
  return f.softcap != 0 || f.bias || f.decay_in_scores;
}
HORNER_HD float last_clamp(const Fused& f) {
  return changes_scores(f) ? INFINITY : f.clamp;
}

inline constexpr int kDqTile = 64;
HORNER_HD bool dq_in_fragments(const Fused& f) {  // whether dq_sum is in fragment order
  return f.dtype != Dtype::float32 && f.D <= 128 && f.E <= 128;
}
// Rows per thread block in `row_gradients`; a block owns rows of one head.
inline constexpr int kRowsPerBlock = 128;
inline int64_t row_blocks(const Fused& f) {
  return int64_t(f.B) * f.H * ((f.T + kRowsPerBlock - 1) / kRowsPerBlock);
}

int compute_capability(int device);  // 80 for 8.0
// The maximum shared memory of a thread block, in bytes.
int shared_memory(int device);

}  // namespace horner::attn::kernels::cuda

// The stages around the weights as tensor code, shared by the executions.
#pragma once

#include "attn/attend.h"

namespace horner::attn {

// The same inputs with each key/value head repeated for the query heads that share it: G = H.
Inputs one_key_head_each(Inputs);

// f(x) of queries or keys; `repeats` query heads share each head of x.
at::Tensor mapped(const Features&, const at::Tensor& x, const at::Tensor& projection,
                  int64_t repeats = 1);

// The begin and end of each token's packed sequence: [T] each, int32. With cu_seqlens_k: of the
// keys of each query's sequence.
std::pair<at::Tensor, at::Tensor> sequences(const Inputs&);

// The keys lo <= s < hi of each query, by its mask and its sequence: [T] each, int64, on the device
// of q. Without the first keys that Streaming and Prefix see besides.
std::pair<at::Tensor, at::Tensor> intervals(const Mask&, const Inputs&);

// The same with the first keys: lo <= s < hi and, for Streaming, from <= s < to, to <= lo (else
// both undefined). hi is [B, T] for Prefix. None decreases with t.
struct KeysSeen {
  at::Tensor lo, hi, from, to;
};
KeysSeen keys_seen(const Mask&, const Inputs&);

// The sums over those keys of x [.., S, C]: [.., T, C], differences of running sums in double.
at::Tensor sums_over_keys(const KeysSeen&, const at::Tensor& x);

// The first key that each query may see: [T], int64.
at::Tensor first_keys(const Mask&, const Inputs&);

// The keys that each query sees: those of its mask, of its sequence and kept.
struct Seen {
  at::Tensor hidden;  // [1 or B, 1, T, S], bool
  at::Tensor count;   // [1 or B, 1, T, 1]
};
Seen seen(const Mask&, const Inputs&);

// Those that are not near.
Seen far_keys(const Spec&, const Seen&);

// The log gates g [B, G, S] of the decay, which is e^(sum of g over (s, t]); undefined for none.
at::Tensor log_gates(const Decay&, const Inputs&);

// The same inputs with a log gate of 0 for one that is NaN and decays nothing: no key is before it
// that is not hidden, nor are there the `before` [B] keys of earlier calls.
Inputs without_idle_gates(Inputs, const at::Tensor& before = {});

// The log gates of the channels [B, G, S, D], in double.
at::Tensor channel_logs(const Inputs&);

// What Delta multiplies the rest of each value by, b_s / w(k_s.k_s): [B, G, S], from the mapped
// keys; 0 for a key that gives nothing or is hidden. For a weight with a finite state.
at::Tensor key_shares(const Spec&, const Inputs&, const at::Tensor& keys);

// count^exponent, NaN for an exponent that is.
at::Tensor count_power(const at::Tensor& count, const at::Tensor& exponent);

// The factor of each value [B, G, S]: the input gate, and that of CountPower for keys that follow
// `before` [B] others; undefined for none.
at::Tensor value_gates(const Spec&, const Inputs&, const at::Tensor& before = {});

// The same operator with value_gates as its input gate.
std::pair<Spec, Inputs> with_value_gates(const Spec&, const Inputs&, const at::Tensor& before = {});

// Scale and temperature: one number. q as given, before f.
double scale_factor(const Spec&, const Inputs&);

// Scale, temperature and a sharpness from the count; broadcasts to [B, H, T, 1].
at::Tensor scale(const Spec&, const Inputs&, const at::Tensor& count);

// log n of each query: [B, H, T]. count: [1 or B, 1, T, 1].
at::Tensor log_count(const at::Tensor& count, const Inputs&);

// From the scaled products x [.., T, S] to the scores: the stages up to the weight. Defined in
// reference.cpp, as is the next.
at::Tensor scores(const Spec&, at::Tensor x, const Seen&, const at::Tensor& bias = {});

// The weights of rows of scaled products x [.., T, S], times e^-shift; 0 where hidden. `summed`,
// unless null: what W sums instead, where that is not the weights.
struct Besides {
  at::Tensor bias;       // [B or 1, H or 1, T, S]
  at::Tensor near;       // the scaled products of near keys, where they are others
  at::Tensor log_decay;  // added to the scores of exp, a factor of the others
  at::Tensor near_share;
};
at::Tensor weights(const Spec&, const at::Tensor& x, const Seen&, at::Tensor& shift,
                   const Besides& = {}, at::Tensor* summed = nullptr);

// The sums of spec.h: N and W both times e^-shift.
struct Sums {
  at::Tensor N;         // [B, H, T, E]
  at::Tensor W;         // [B, H, T, 1]
  at::Tensor shift;     // [B, H, T, 1], or [1] of zero; a constant
  at::Tensor count;     // [1 or B, 1, T, 1]
  at::Tensor gates;     // [B, H, T, 1], for CumulativeGate: the sum of e^gate over the keys seen
  at::Tensor far = {};  // [1 or B, 1, T, 1], the number of keys that are not near; undefined: all
};

at::Tensor log_sum(const Sums&);  // log W without the e^-shift, [B, H, T], a constant

// Denominator, output gates and norm; in the dtype of q.
at::Tensor finish(const Spec&, const Inputs&, const Sums&);

at::ScalarType wide(at::ScalarType);     // float32 for the 16-bit types, else the type itself
at::Tensor plain(const at::Tensor&);     // float32, contiguous; undefined for none
at::Tensor sink_of_rows(const Inputs&);  // likewise, [B, H, T]

// The memory [4, B, H, T] to which a kernel writes statistics, with views of it in `to`; undefined
// where `to` is null or wants only the log of the sum.
at::Tensor statistics_memory(const Inputs&, Statistics* to);
at::Tensor log_sum_memory(const Inputs&);  // [B, H, T]

// Adds the gradients of the queries' decay sums [B, H, T] to those of the keys' [B, G, S]: a
// query's own sum is that of the key at its position.
void add_query_decay(const at::Tensor& d_decay, const at::Tensor& d_query);

// Sets the norm in the epilogue of the kernels on the CPU or on CUDA.
template <class Epilogue>
struct SetNorm {
  Epilogue& p;

  void operator()(NoNorm) const { p.norm = Epilogue::none; }
  void operator()(L2 n) const { p.norm = Epilogue::l2, p.times_dim = n.times_dim; }
  void operator()(Rms n) const { p.norm = Epilogue::rms, p.eps = float(n.eps); }
  void operator()(Layer n) const { p.norm = Epilogue::layer, p.eps = float(n.eps); }
};

}  // namespace horner::attn

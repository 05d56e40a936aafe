// The stages around the weights as tensor code, shared by the executions.
#pragma once

#include "attn/attend.h"

namespace horner::attn {

// The same inputs with each key/value head repeated for the query heads that share it: G = H.
Inputs one_key_head_each(Inputs);

// f(x) of queries or keys; `repeats` query heads share each head of x.
at::Tensor mapped(const Features&, const at::Tensor& x, const at::Tensor& projection,
                  int64_t repeats = 1);

// The keys lo <= s < hi that the mask shows each query: [T] each, int64, on the device of q.
std::pair<at::Tensor, at::Tensor> intervals(const Mask&, const Inputs&);

// The keys that each query sees: those of its mask, of its sequence and kept.
struct Seen {
  at::Tensor hidden;  // [1 or B, 1, T, S], bool
  at::Tensor count;   // [1 or B, 1, T, 1]
};
Seen seen(const Mask&, const Inputs&);
at::Tensor first_keys(const Mask&, const Inputs&);  // [T]: the first key of each query's interval

// The log gates g [B, G, S] of the decay, which is e^(sum of g over (s, t]); undefined for none.
at::Tensor log_gates(const Decay&, const Inputs&);

// Scale and temperature: one number.
double scale_factor(const Spec&, const Inputs&);

// Scale, temperature and a sharpness from the count; broadcasts to [B, H, T, 1].
at::Tensor scale(const Spec&, const Inputs&, const at::Tensor& count);

// The weights of rows of scaled scores x [.., T, S], times e^-shift; 0 where hidden. Defined in
// reference.cpp.
at::Tensor weights(const Spec&, at::Tensor x, const Seen&, at::Tensor& shift);

// The sums of spec.h: N and W both times e^-shift.
struct Sums {
  at::Tensor N;      // [B, H, T, E]
  at::Tensor W;      // [B, H, T, 1]
  at::Tensor shift;  // [B, H, T, 1] or [1], a constant
  at::Tensor count;  // [1 or B, 1, T, 1]
  at::Tensor gates;  // [B, H, T, 1], for CumulativeGate: the sum of e^gate over the keys seen
};

// Denominator, output gates and norm; in the dtype of q.
at::Tensor finish(const Spec&, const Inputs&, const Sums&);

at::ScalarType wide(at::ScalarType);  // float32 for the 16-bit types, else the type itself

}  // namespace horner::attn

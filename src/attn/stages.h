// The stages around the weights, as tensor code: for the executions whose sums are tensors.
#pragma once

#include "attn/attend.h"

namespace horner::attn {

// The same inputs with each key/value head repeated for the query heads that share it: G = H.
Inputs one_key_head_each(Inputs);

// f(x) of a query or a key; `repeats` is for how many query heads each of its heads stands.
at::Tensor mapped(const Features&, const at::Tensor& x, const at::Tensor& projection,
                  int64_t repeats = 1);

// What each query sees.
struct Seen {
  at::Tensor hidden;  // [1 or B, 1, T, S], bool
  at::Tensor count;   // [1 or B, 1, T, 1]
};
Seen seen(const Mask&, const Inputs&);
at::Tensor first_keys(const Mask&, const Inputs&);  // [T]: where each query's interval begins

// Scale and temperature: one number.
double scale_factor(const Spec&, const Inputs&);

// Scale, temperature and those kinds of sharpness that depend on the count alone; broadcasts to
// [B, H, T, 1].
at::Tensor scale(const Spec&, const Inputs&, const at::Tensor& count);

// The weights of rows of scores x [.., T, S], which are scaled and nothing else, times e^-shift; 0
// where hidden. In reference.cpp: the definition.
at::Tensor weights(const Spec&, at::Tensor x, const Seen&, at::Tensor& shift);

// The sums of spec.h: N and W both times e^-shift.
struct Sums {
  at::Tensor N;      // [B, H, T, E]
  at::Tensor W;      // [B, H, T, 1]
  at::Tensor shift;  // [B, H, T, 1] or [1], a constant
  at::Tensor count;  // [1 or B, 1, T, 1]
  at::Tensor gates;  // [B, H, T, 1], of CumulativeGate: the sum of e^gate over the keys seen
};

// Denominator, gates and norm; in the dtype of q.
at::Tensor finish(const Spec&, const Inputs&, const Sums&);

at::ScalarType wide(at::ScalarType);  // float32 for the 16-bit types, else the type itself

}  // namespace horner::attn

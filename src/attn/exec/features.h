// Feature maps, which give a weight a finite state:
//   query_features(t) . key_features(s) == weight(x_ts),
// by  (q.k)^n / n! = sum over the monomials a of degree n of  q^a * k^a / a!.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "attn/attend.h"
#include "attn/exec/stages.h"

namespace horner::attn::exec {

// What a state is made of and asked with; G = H, everything at least float32.
struct Expanded {
  at::Tensor q, k;   // [B, H, T, F]
  at::Tensor v;      // [B, H, T, E + 1]: gated, beside a column of ones that carries the row sum
  at::Tensor decay;  // [B, H, T], zeros where there is none
  at::Tensor count;  // [1 or B, 1, T, 1]
};
Expanded expand(const Spec&, const Inputs&);

// The result from the sums [B, H, T, E + 1] over each query's keys.
at::Tensor finish_sums(const Spec&, const Inputs&, const Expanded&, const at::Tensor& sums);

// How many features a key of D channels has; infinite for a weight without a finite state.
double feature_count(const Spec&, int64_t D);
std::string why_no_state(const Spec&, const Inputs&);

}  // namespace horner::attn::exec

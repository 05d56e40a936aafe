// The delta rule for any weight of one score, in quadratic time.
#pragma once

#include <string_view>
#include <utility>

#include "attn/attend.h"

namespace horner::attn::exec {

// The weights, times the decay, of keys from <= t < to, as queries of the keys before `to`: [B, G,
// to - from, to], times e^-shift. `in` has mapped keys. Defined in reference.cpp.
at::Tensor key_rows(const Spec&, const Inputs& in, double scale, int64_t from, int64_t to,
                    at::Tensor& shift);

// The same operator with the corrected values of Delta as its values, for an execution on any
// device. Keeps blocks of rows, not the S x S matrix.
std::pair<Spec, Inputs> with_corrected_values(std::string_view execution, const Spec&,
                                              const Inputs&);

// Corrects the values v [B, G, S, E] of the keys from `first` on in place: of one sequence, with
// input gates already. Those before are corrected, and `beta` is that of the others.
void correct_values(const Spec&, const Inputs&, int64_t first, const at::Tensor& v);

// The bytes that its nodes keep (Execution::kept); 0 without Delta.
c10::SymInt kept_corrected(const Spec&, const Inputs&);

}  // namespace horner::attn::exec

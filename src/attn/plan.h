// What the recurrent form of a variant needs:
//   S_t = S_{t-1} + phi(k_t) [v_t 1]^T,  with F features phi and E value channels.
#pragma once

#include <cstdint>
#include <string>

#include "attn/spec.h"

namespace horner::attn {

// F for keys of D channels: the monomials of a weight's orders, each once. Infinite where the
// weight has no finite state.
double feature_count(const Spec&, int64_t D);

// Bytes of one head's state in float32.
double state_bytes(const Spec&, int64_t D, int64_t E);

// "" when there is a finite state, else the reason.
std::string why_no_state(const Spec&);

}  // namespace horner::attn

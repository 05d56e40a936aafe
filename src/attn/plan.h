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

// Channels of a key behind the features, of D before.
int64_t mapped_channels(const Spec&, int64_t D);

// The lowest and the highest order of a polynomial weight; 0 and 0 of any other.
struct Orders {
  int first, last;
};
Orders orders(const Weight&);

// Whether the sums of its state are kept in double: above order 3 they cancel more than the weights
// themselves do, and in float32 would be further from the truth than `reference` is.
bool sums_in_double(const Spec&);

// Bytes of one head's state.
double state_bytes(const Spec&, int64_t D, int64_t E);

struct StateShape {
  int64_t B, G, D, E;
};
inline constexpr double kMostStateBytes = 1 << 30;
// "" when the state of all heads is no larger than that, else its size.
std::string why_too_large(const Spec&, const StateShape&);

// Tokens of a chunk: the cheapest sum of the work inside chunks and of the passes over the state.
int chunk_length(const Spec&, int64_t D, int64_t E);

// "" when there is a finite state, else the reason.
std::string why_no_state(const Spec&);

// Multiplications of a forward pass over T queries and S keys, for each query head: in tiles over
// all keys, in chunks, or token by token.
double work_in_tiles(const Spec&, int64_t T, int64_t S, int64_t D, int64_t E);
double work_in_chunks(const Spec&, int64_t S, int64_t D, int64_t E);
double work_by_token(const Spec&, int64_t S, int64_t D, int64_t E);

// The context from which on a token takes less time with a state than with a float32 cache of keys
// and values: both read all that they hold.
double decode_crossover(const Spec&, int64_t D, int64_t E);

}  // namespace horner::attn

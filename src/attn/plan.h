// What the forms of a variant need and cost. The recurrent form:
//   S_t = S_{t-1} + phi(k_t) [v_t 1]^T,  with F features phi and E value channels.
#pragma once

#include <cstdint>
#include <string>

#include "attn/spec.h"

namespace horner::attn {

// The dimension of f(k) for keys of D channels.
int64_t mapped_channels(const Spec&, int64_t D);

// What the sharpness is computed from. `nothing`: it is 1.
enum class SharpnessFrom { nothing, count, entropy };
SharpnessFrom sharpness_from(const Sharpness&);

// Whether the weight of a score depends on the other scores of its row.
bool needs_the_row(const Spec&);

// Whether weights may be negative: those of a weight that can be, for scores that can be.
bool may_be_negative(const Spec&);

// "" when there is a finite state, else the reason.
std::string why_no_state(const Spec&);

// F for keys of D channels: the monomials of the weight's orders, each once. Infinite where there
// is no finite state.
double feature_count(const Spec&, int64_t D);

// Whether the sums of the state are kept in double: above order 3, of centred scores and of
// channels with gates, they cancel more than the weights do, and float32 sums would be
// further from the truth than `reference` is.
bool sums_in_double(const Spec&);

// Bytes of one head's state.
double state_bytes(const Spec&, int64_t D, int64_t E);

struct StateShape {
  int64_t B, G, D, E;
};
inline constexpr double kMostStateBytes = 1 << 30;
// "" when the state of all heads fits in that, else a reason with its size.
std::string why_too_large(const Spec&, const StateShape&);

// Tokens in a chunk: minimises the work inside chunks plus the passes over the state.
int chunk_length(const Spec&, int64_t D, int64_t E);

// The number of pairs of a query and a key that it sees. A pair at the end of an interval counts
// half: T^2 / 2 for T causal queries.
double seen_pairs(const Mask&, int64_t T, int64_t S);

// Multiplications of a forward pass over T queries and S keys, for each query head: in tiles over
// all keys, in chunks, or token by token.
double work_in_tiles(const Spec&, int64_t T, int64_t S, int64_t D, int64_t E);
double work_in_chunks(const Spec&, int64_t S, int64_t D, int64_t E);
double work_by_token(const Spec&, int64_t S, int64_t D, int64_t E);

// The context length from which decoding with a state reads less memory per token than decoding
// with a float32 KV cache.
double decode_crossover(const Spec&, int64_t D, int64_t E);

}  // namespace horner::attn

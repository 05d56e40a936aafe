// Dropout of weights: whether the pair of a query and a key stays, as a pure function of a seed,
// the sequence, the head, the query and the key. Every execution asks it, forward and backward;
// nothing is stored. A pair is dropped where its 32 bits are below `below`; the others count `kept`
// times.
#pragma once

#include <cstdint>

#include "attn/math.h"
#include "core/random.h"

namespace horner::attn {

struct Dropout {
  uint64_t seed = 0;
  uint32_t below = 0;  // 2^32 p; 0: nothing is dropped
  float kept = 1;      // 1 / (1 - p)
};
constexpr uint32_t dropped_below(double p) {
  return uint32_t(p * 4294967296.);
}

// What the bits of a row's pairs have in common.
struct DropoutRow {
  uint32_t first, second;
};
constexpr uint64_t dropout_head(uint64_t seed, int64_t b, int64_t h) {
  return of_stream(seed, uint64_t(b) << 32 | uint64_t(h));
}
constexpr DropoutRow dropout_row(uint64_t head, int64_t t) {
  const uint64_t bits = random_bits(head, uint64_t(t));
  return {uint32_t(bits), uint32_t(bits >> 32)};
}
constexpr DropoutRow dropout_row(uint64_t seed, int64_t b, int64_t h, int64_t t) {
  return dropout_row(dropout_head(seed, b, h), t);
}

// Of key s: MurmurHash3's finaliser (Appleby 2011), with the row's numbers before and within it. U
// is uint32_t or a vector of it.
inline constexpr uint32_t kDropoutMix1 = 0x85EBCA6B, kDropoutMix2 = 0xC2B2AE35;
template <class U>
HORNER_HD U dropout_bits(DropoutRow row, U s) {
  U x = s + row.first;
  x = (x ^ (x >> 16)) * kDropoutMix1;
  x = ((x ^ (x >> 13)) + row.second) * kDropoutMix2;
  return x ^ (x >> 16);
}

}  // namespace horner::attn

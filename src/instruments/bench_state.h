// How fast is decoding, and the arithmetic of a state?
#pragma once

#include <functional>
#include <string>

#include "attn/state.h"

namespace horner::instruments {

using namespace attn;

struct Stream {
  int64_t B = 1, H = 8, D = 64;  // G = H, E = D
  int64_t buffer = 64;
};

// "" when a prompt and tokens after it give what the reference gives, else by how much they do not.
std::string why_wrong(const Spec&, const Stream&);

struct DecodeTime {
  double us = 0;      // for a token, all heads: the median over runs of 64 tokens
  int64_t bytes = 0;  // that the state holds
  int64_t context = 0;
};
// Takes tokens in up to each of `contexts`, in rising order, and times the ones that follow. Stops
// early when `stop` says so.
std::vector<DecodeTime> time_decoding(const Spec&, const Stream&,
                                      const std::vector<int64_t>& contexts,
                                      const std::function<bool()>& stop);

// GFLOP/s of taking in `tokens` tokens at once, counting the products with the state alone.
double state_gflops(const Spec&, const Stream&, int64_t tokens);

}  // namespace horner::instruments

// The speed of decoding, and of the arithmetic of a state.
#pragma once

#include <functional>
#include <string>

#include "attn/state.h"

namespace horner::instruments {

using namespace attn;

struct Stream {
  int64_t B = 1, H = 8, D = 64;  // G = H, E = D
  int64_t buffer = 64;
  int runs = 7;  // timed ones of each context
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
};

// "" if prefill and decoding give the results of the reference, else a reason with the error.
std::string why_wrong(const Spec&, const Stream&);

struct DecodeTime {
  double us = 0;      // per token, all heads: the median over runs of 64 tokens
  int64_t bytes = 0;  // of the state
  int64_t context = 0;
};
// Adds tokens up to each of `contexts`, in rising order, and times the ones that follow. Returns
// early if `stop` returns true.
std::vector<DecodeTime> time_decoding(const Spec&, const Stream&,
                                      const std::vector<int64_t>& contexts,
                                      const std::function<bool()>& stop);

// GFLOP/s of prefill with `tokens` tokens, counting only the products with the state.
double state_gflops(const Spec&, const Stream&, int64_t tokens);

}  // namespace horner::instruments

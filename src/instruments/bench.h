// The speed and memory use of an execution.
//
// Check, then time: no speed is reported if the result of a short case with the same heads,
// channels and dtype is wrong. Runs alternate with torch's causal softmax, so that noise affects
// both.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "instruments/verify.h"

namespace horner::instruments {

using namespace attn;

struct Effort {
  int repeats = 0;                                    // 0: as many as fit in a second, 3 to 30
  bool statistics = false;                            // also time a forward pass with statistics
  std::function<bool()> stop = [] { return false; };  // called between runs
};

struct Timing {
  double ms = 0;                        // the median of `runs`
  std::optional<double> torch_ms = {};  // of torch's runs between them; none without a yardstick
  double best_ms = 0;
  double flop = 0;
  int runs = 0;

  double gflops() const { return flop / ms / 1e6; }
};

enum class Standing { right, wrong, cannot_run, stopped };

struct Benchmark {
  Standing standing = Standing::right;
  std::string why_not = "";               // when it cannot run
  std::optional<Difference> worst = {};   // of the check
  std::optional<Timing> forward = {};     // without gradients
  std::optional<Timing> both = {};        // forward and backward, unless `c.gradients` is false
  std::optional<double> statistics = {};  // time of a forward pass with statistics / without
  int64_t extra_bytes = 0;                // peak memory that torch allocated beyond the inputs
};

// Causal softmax by at::scaled_dot_product_attention: the yardstick. Not an execution of `attend`.
extern const Execution torch_sdpa;
std::span<const Execution* const> peers();  // torch_sdpa, and its backends on a GPU

// With `yardstick`, torch_sdpa is timed beside it.
Benchmark bench(const Spec&, const Execution&, const Case& c, const Effort&, bool yardstick);

// Floating-point operations of a fused execution's products over the keys seen: two products
// forward, seven with backward.
double flop(const Spec&, const Case&, bool backward);

// The best of several products of 2048 x 2048 matrices, or of smaller ones if those are slow.
double matmul_gflops(at::ScalarType, at::Device);

void wait_for(at::Device);  // until it has done all work

double free_bytes();  // of main memory; infinite if unknown

std::string_view cpu_kernels();  // the instruction set of the CPU kernels in use: "avx512"

}  // namespace horner::instruments

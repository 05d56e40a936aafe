// How fast is an execution, and how much memory does it take?
//
// Check, then time: what is wrong on a short case of the same heads, channels and dtype gets no
// speed. Then it runs in turn with torch's causal softmax, so that noise hits both alike.
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
  int repeats = 0;                                    // 0: what fits in a second, 3 to 30
  bool statistics = false;                            // time them too
  std::function<bool()> stop = [] { return false; };  // asked between runs
};

struct Timing {
  double ms = 0;                        // the median of `runs`
  std::optional<double> torch_ms = {};  // that of torch between them; none where torch is wrong
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
  std::optional<double> statistics = {};  // the time of a forward with them over one without
  int64_t extra_bytes = 0;  // the most that torch had allocated at once beyond the inputs
};

// Causal softmax by at::scaled_dot_product_attention: the yardstick. No execution of `attend`.
extern const Execution torch_sdpa;
std::span<const Execution* const> peers();  // torch_sdpa, and its backends on a GPU

// With `yardstick`, torch_sdpa is timed beside it.
Benchmark bench(const Spec&, const Execution&, const Case& c, const Effort&, bool yardstick);

// Of the products that a fused execution makes over the keys seen: two forward, seven in all.
double flop(const Spec&, const Case&, bool backward);

// The best of several products of 2048 x 2048 matrices; of smaller ones where those take long.
double matmul_gflops(at::ScalarType, at::Device);

double free_bytes();  // of main memory; infinite where that is not known

std::string_view cpu_kernels();  // the instruction set of the CPU kernels that run: "avx512"

}  // namespace horner::instruments

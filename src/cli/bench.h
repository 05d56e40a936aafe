// The benchmarks of `horner bench` that have a file of their own.
#pragma once

#include <cstdint>

#include "cli/command.h"
#include "instruments/bench.h"

namespace horner::cli {

struct Shown {
  bool json = false;
  std::string svg = {};  // the file of a picture; empty: none
};

// Contexts up to the tokens of the case, with its sizes, dtype and device.
// `repeats`: timed runs of each context; 0: the default.
Outcome bench_decode(const std::vector<attn::Variant>&, const instruments::Case&, int repeats,
                     const Shown&);

// The time of a token of whole models, after 1,024 to 1,048,576 others.
struct ModelTiming {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::ScalarType::Undefined;  // that of the weights
  int runs = 7;
};
Outcome bench_models(const std::vector<std::string>& models, const ModelTiming&, bool json);

Outcome bench_order(uint64_t seed, const Shown&);

struct BenchRow {
  std::string variant, execution;
  instruments::Benchmark result;
};

// Rows that an external command measures on the same shape (bench/peers.py is one). It receives
// --shape, --dtype, --device and possibly --forward-only, and prints one JSON object per line,
// {"variant", "execution", "forward_ms", "both_ms", "extra_bytes"}, or
// {"variant", "execution", "why_not"}.
std::vector<BenchRow> peers_of(const std::string& command, const instruments::Case&);

// Throws for an option that benchmark `what` does not use.
void check_bench_options(const CLI::App&, const std::string& what);

}  // namespace horner::cli

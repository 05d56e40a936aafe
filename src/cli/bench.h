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

// `shape`: batch, heads, the longest context, head dimension.
Outcome bench_decode(const std::vector<attn::Variant>&, const std::vector<int64_t>& shape,
                     const Shown&);

Outcome bench_order(uint64_t seed, const Shown&);

struct BenchRow {
  std::string variant, execution;
  instruments::Benchmark result;
};

// What a command of the user's measures on the same shape (bench/peers.py is one): it is given
// --shape, --dtype, --device and perhaps --forward-only, and prints an object for each row in a
// line of its own, {"variant", "execution", "forward_ms", "both_ms", "extra_bytes"}, or
// {"variant", "execution", "why_not"}.
std::vector<BenchRow> peers_of(const std::string& command, const instruments::Case&);

// Throws when an option was given that benchmark `what` has no use for.
void check_bench_options(const CLI::App&, const std::string& what);

}  // namespace horner::cli

// The benchmarks of `horner bench` that have a file of their own.
#pragma once

#include <cstdint>

#include "cli/command.h"

namespace horner::cli {

struct Shown {
  bool json = false;
  std::string svg = {};  // the file of a picture; empty: none
};

// `shape`: batch, heads, the longest context, head dimension.
Outcome bench_decode(const std::vector<attn::Variant>&, const std::vector<int64_t>& shape,
                     const Shown&);

Outcome bench_order(uint64_t seed, const Shown&);

// Throws when an option was given that benchmark `what` has no use for.
void check_bench_options(const CLI::App&, const std::string& what);

}  // namespace horner::cli

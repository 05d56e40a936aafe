// The benchmarks of `horner bench` that have a file of their own.
#pragma once

#include "cli/command.h"

namespace horner::cli {

// `shape`: batch, heads, the longest context, head dimension.
Outcome bench_decode(const std::vector<attn::Variant>&, const std::vector<int64_t>& shape,
                     bool json);

}  // namespace horner::cli

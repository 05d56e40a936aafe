// The instruction sets that the CPU kernels are compiled for, and the choice among them at run
// time.
#pragma once

#include <string_view>
#include <vector>

namespace horner::simd {

enum class Isa { portable, avx2, avx512, avx512_bf16, amx };  // each includes the ones before it

std::string_view name(Isa);
std::vector<Isa> supported();  // by this CPU, best first

// The best set that this CPU supports, or the one that the environment variable HORNER_CPU names;
// throws if this CPU does not support that one.
Isa isa();

}  // namespace horner::simd

// The instruction sets that CPU kernels are compiled for, and the choice among them at run time.
#pragma once

#include <string_view>
#include <vector>

// Declares something in a namespace for each instruction set; not every set has to define it.
// clang-format off
#define HORNER_PER_ISA(...)                                              \
  namespace portable { __VA_ARGS__ } namespace avx2 { __VA_ARGS__ }      \
  namespace avx512 { __VA_ARGS__ } namespace avx512_bf16 { __VA_ARGS__ } \
  namespace amx { __VA_ARGS__ }
// clang-format on

namespace horner::simd {

enum class Isa { portable, avx2, avx512, avx512_bf16, amx };  // each includes the ones before it

std::string_view name(Isa);
std::vector<Isa> supported();  // by this CPU, best first

// The best set that this CPU supports, or the one that the environment variable HORNER_CPU names;
// throws if this CPU does not support that one.
Isa isa();

}  // namespace horner::simd

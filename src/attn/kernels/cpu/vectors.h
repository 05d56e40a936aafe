// The vectors of core/simd in the namespace of the CPU kernels, and the functions that attn/math.h
// needs to evaluate weights on them.
#pragma once

#include "attn/math.h"
#include "core/simd/vec.h"

namespace horner::attn {

namespace kernels::HORNER_ISA {
using namespace simd::HORNER_ISA;
}

template <>
struct Maths<simd::HORNER_ISA::Vec> {
  using Vec = simd::HORNER_ISA::Vec;
  static HORNER_HD Vec exp(Vec x) { return simd::HORNER_ISA::exp(x); }
};
template <>
struct Maths<simd::HORNER_ISA::VecDouble> {
  using Vec = simd::HORNER_ISA::VecDouble;
  static HORNER_HD Vec exp(Vec x) {
    for (int i = 0; i < simd::HORNER_ISA::kLanes<double>; ++i) x[i] = ::exp(x[i]);
    return x;
  }
};

}  // namespace horner::attn

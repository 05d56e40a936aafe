// Dropout of a row of weights, for the CPU kernels.
#pragma once

#include "attn/dropout.h"
#include "attn/kernels/cpu/vectors.h"

namespace horner::attn::kernels::HORNER_ISA {

typedef uint32_t VecBits __attribute__((vector_size(kWidth * 4)));

// Multiplies n numbers, a multiple of kWidth, of the keys from s by 0 or by 1 / (1 - p).
static void drop(const Dropout& d, DropoutRow row, int64_t s, int64_t n, float* x) {
  for (int64_t j = 0; j < n; j += kWidth) {
    const VecBits bits = dropout_bits(row, reinterpret_cast<VecBits>(lanes(int(s + j))));
    store(x + j, choose(VecInt(bits < d.below), Vec{}, load(x + j) * d.kept));
  }
}

}  // namespace horner::attn::kernels::HORNER_ISA

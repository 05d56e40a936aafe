// Products of bfloat16 pairs, for instruction sets with AVX512-BF16: a 32-bit word holds two
// neighbours along the summed dimension, and one instruction multiplies and adds both.
//   C[m, n] (+)= sum_p A(m, p) . B[p, n],  A(m, p) and B[p, n] pairs, C in float32
#pragma once

#include "core/simd/gemm.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace horner::simd::HORNER_ISA {

struct PairProduct {
  static constexpr int kLanes = kWidth;
  const uint32_t* a;
  int64_t a_row, a_col;  // A(m, p) = a[m * a_row + p * a_col]
  const uint32_t* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  int m, n, k;  // k pairs
};

template <int Rows, int Columns, bool Add>
inline void micro(const PairProduct& p) {
  __m512 c[Rows][Columns];
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Columns; ++j) c[i][j] = _mm512_setzero_ps();
  const uint32_t *a = p.a, *b = p.b;
  for (int k = 0; k < p.k; ++k, a += p.a_col, b += p.ldb) {
    __m512i row[Columns];
    for (int j = 0; j < Columns; ++j) row[j] = _mm512_loadu_si512(b + j * kWidth);
    for (int i = 0; i < Rows; ++i) {
      const __m512i x = _mm512_set1_epi32(int(a[i * p.a_row]));
      for (int j = 0; j < Columns; ++j)
        c[i][j] = _mm512_dpbf16_ps(c[i][j], (__m512bh)x, (__m512bh)row[j]);
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Columns; ++j) {
      float* to = p.c + i * p.ldc + j * kWidth;
      store(to, Add ? load(to) + Vec(c[i][j]) : Vec(c[i][j]));
    }
}

// kWidth bfloat16 numbers as floats.
inline Vec widened(const uint32_t* pairs) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)pairs));
  return (Vec)_mm512_slli_epi32(x, 16);
}
// kWidth floats, rounded to bfloat16.
inline __m256i rounded(const float* x) {
  return (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x));
}
// [rows, C] -> [rows, C / 2] pairs of neighbours in a row.
inline void pair_columns(const float* x, int64_t ldx, uint32_t* to, int64_t ldto, int rows, int C) {
  for (int i = 0; i < rows; ++i)
    for (int c = 0; c < C; c += kWidth)
      _mm256_storeu_si256((__m256i*)(to + i * ldto + c / 2), rounded(x + i * ldx + c));
}
inline void store_pairs(uint32_t* to, __m256i even, __m256i odd) {
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16);
  _mm512_storeu_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(even), high));
}
// [rows, C] -> [rows / 2, C] pairs of neighbours in a column; an odd last row is paired with zeros.
inline void pair_rows(const float* x, int64_t ldx, uint32_t* to, int64_t ldto, int rows, int C) {
  for (int i = 0; i < rows; i += 2)
    for (int c = 0; c < C; c += kWidth)
      store_pairs(to + i / 2 * ldto + c, rounded(x + i * ldx + c),
                  i + 1 < rows ? rounded(x + (i + 1) * ldx + c) : _mm256_setzero_si256());
}
inline void pair_rows(const uint16_t* x, int64_t ldx, uint32_t* to, int64_t ldto, int rows, int C) {
  for (int i = 0; i < rows; i += 2)
    for (int c = 0; c < C; c += kWidth) {
      const auto at = [&](int r) { return _mm256_loadu_si256((const __m256i*)(x + r * ldx + c)); };
      store_pairs(to + i / 2 * ldto + c, at(i), i + 1 < rows ? at(i + 1) : _mm256_setzero_si256());
    }
}

}  // namespace horner::simd::HORNER_ISA
#endif

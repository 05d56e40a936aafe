// C[m, n] (+)= sum_k A(m, k) B[k, n]: small products of tiles that fit in the caches.
// A is read one number at a time, with any strides. Rows of B and C are whole vectors: n is a
// multiple of the lanes (packing pads with zeros).
#pragma once

#include "core/simd/vec.h"

namespace horner::simd::HORNER_ISA {

template <class R>
struct ProductOf {
  static constexpr int kLanes = simd::HORNER_ISA::kLanes<R>;
  const R* a;
  int64_t a_row, a_col;  // A(m, k) = a[m * a_row + k * a_col]
  const R* b;
  int64_t ldb;
  R* c;
  int64_t ldc;
  int m, n, k;
};
using Product = ProductOf<float>;

// A micro-tile of C, Rows x Columns vectors, in registers.
template <int Rows, int Columns, bool Add, class R>
inline void micro(const ProductOf<R>& p) {
  VecOf<R> c[Rows][Columns];
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Columns; ++j) c[i][j] = VecOf<R>{};
  const R *a = p.a, *b = p.b;
  for (int k = 0; k < p.k; ++k, a += p.a_col, b += p.ldb) {
    VecOf<R> row[Columns];
    for (int j = 0; j < Columns; ++j) row[j] = load(b + j * p.kLanes);
    for (int i = 0; i < Rows; ++i) {
      const VecOf<R> x = splat(a[i * p.a_row]);
      for (int j = 0; j < Columns; ++j) c[i][j] += x * row[j];
    }
  }
  for (int i = 0; i < Rows; ++i)
    for (int j = 0; j < Columns; ++j) {
      // C is added last: sums of short sums round less than one long sum does.
      R* to = p.c + i * p.ldc + j * p.kLanes;
      store(to, Add ? load(to) + c[i][j] : c[i][j]);
    }
}

// The rows of a micro-tile that fill the registers, next to Columns vectors of B.
inline constexpr int kRegisters = kWidth == 16 ? 32 : 16;
template <int Columns>
inline constexpr int kRows =
    (kRegisters - Columns - 2) / Columns < 12 ? (kRegisters - Columns - 2) / Columns : 12;

template <int Rows, int Columns, bool Add, class P>
inline void rows(P p) {
  for (; p.m >= Rows; p.m -= Rows, p.a += Rows * p.a_row, p.c += Rows * p.ldc)
    micro<Rows, Columns, Add>(p);
  if constexpr (Rows > 1)
    if (p.m > 0) rows<Rows / 2, Columns, Add>(p);
}

template <int Columns, bool Add, class P>
inline void columns(P p) {
  constexpr int n = Columns * P::kLanes;
  for (; p.n >= n; p.n -= n, p.b += n, p.c += n) rows<kRows<Columns>, Columns, Add>(p);
  if constexpr (Columns > 1)
    if (p.n > 0) columns<Columns - 1, Add>(p);
}

// P is a Product, or a PairProduct (bf16.h).
template <bool Add, class P = Product>
inline void multiply(const P& p) {
  columns<kWidth == 16 ? 4 : 2, Add>(p);
}

}  // namespace horner::simd::HORNER_ISA

// Products of bfloat16 pairs in AMX tile registers: one instruction multiplies a tile of A (16 rows
// of 16 pairs) by a tile of B (16 pairs of 16 columns) into a tile of C (16 x 16 floats). bf16.h
// multiplies the edges that do not fill a tile.
#pragma once

#include "core/simd/bf16.h"

#ifdef __AVX512BF16__
namespace horner::simd::HORNER_ISA {

#ifndef __AMX_BF16__
inline constexpr bool kTileRegisters = false;
struct TileShapes {};
template <bool Add>
inline void multiply_tiles(const PairProduct& p) {
  multiply<Add>(p);
}
#else
inline constexpr bool kTileRegisters = true;
inline constexpr int kSide = 16;

// Configures all eight tile registers of this thread as 16 rows of 64 bytes while it lives.
struct TileShapes {
  TileShapes() {
    alignas(64) uint8_t shape[64] = {};
    shape[0] = 1;  // the palette
    for (int i = 0; i < 8; ++i) {
      shape[16 + 2 * i] = 64;  // bytes per row
      shape[48 + i] = kSide;   // rows
    }
    asm volatile("" ::: "memory");
    _tile_loadconfig(shape);
  }
  ~TileShapes() { _tile_release(); }
};

// Rows x Columns tiles of C, each 1 or 2: tiles 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
template <int Rows, int Columns, bool Add>
inline void block(const PairProduct& p, int k) {
  const int64_t lda = p.a_row * 4, ldb = p.ldb * 4, ldc = p.ldc * 4;
  float *c0 = p.c, *c1 = p.c + kSide * p.ldc;
  if constexpr (Add) {
    _tile_loadd(0, c0, ldc);
    if constexpr (Columns > 1) _tile_loadd(1, c0 + kSide, ldc);
    if constexpr (Rows > 1) _tile_loadd(2, c1, ldc);
    if constexpr (Rows > 1 && Columns > 1) _tile_loadd(3, c1 + kSide, ldc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < k; i += kSide) {
    const uint32_t *a = p.a + i, *b = p.b + i * p.ldb;
    _tile_loadd(4, a, lda);
    if constexpr (Rows > 1) _tile_loadd(5, a + kSide * p.a_row, lda);
    _tile_loadd(6, b, ldb);
    if constexpr (Columns > 1) _tile_loadd(7, b + kSide, ldb);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Columns > 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (Rows > 1) _tile_dpbf16ps(2, 5, 6);
    if constexpr (Rows > 1 && Columns > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c0, ldc);
  if constexpr (Columns > 1) _tile_stored(1, c0 + kSide, ldc);
  if constexpr (Rows > 1) _tile_stored(2, c1, ldc);
  if constexpr (Rows > 1 && Columns > 1) _tile_stored(3, c1 + kSide, ldc);
}

template <int Rows, bool Add>
inline void tile_rows(PairProduct p, int k) {
  for (; p.n >= 2 * kSide; p.n -= 2 * kSide, p.b += 2 * kSide, p.c += 2 * kSide)
    block<Rows, 2, Add>(p, k);
  if (p.n > 0) block<Rows, 1, Add>(p, k);
}

// Requires a_col = 1 (the pairs of a row of A are contiguous) and n a multiple of 16.
template <bool Add>
inline void multiply_tiles(PairProduct p) {
  asm volatile("" ::: "memory");  // earlier stores must reach memory before the tile loads
  const int k = p.k / kSide * kSide;
  if (k == 0) return multiply<Add>(p);
  PairProduct rest = p;  // the pairs beyond k
  rest.a += k, rest.b += k * p.ldb, rest.k -= k, rest.m = p.m / kSide * kSide;
  for (; p.m >= 2 * kSide; p.m -= 2 * kSide, p.a += 2 * kSide * p.a_row, p.c += 2 * kSide * p.ldc)
    tile_rows<2, Add>(p, k);
  if (p.m >= kSide) {
    tile_rows<1, Add>(p, k);
    p.m -= kSide, p.a += kSide * p.a_row, p.c += kSide * p.ldc;
  }
  if (p.m > 0) multiply<Add>(p);
  if (rest.k > 0 && rest.m > 0) multiply<true>(rest);
}
#endif

}  // namespace horner::simd::HORNER_ISA
#endif

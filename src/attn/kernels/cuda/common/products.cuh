// Products of tiles in shared memory by one warp: C [16 atoms, 8 n], accumulators in registers.
#pragma once

#include "attn/kernels/cuda/common/mma.cuh"

namespace horner::attn::kernels::cuda {

// C [16 atoms, 8 n] = A B^T: rows of `a` from row_a on, rows of `b` from row_b on. overlap(i) is
// executed while the products of step i run.
template <class T, int atoms, int n, int C, class Overlap>
__device__ __forceinline__ void mma_abt(float (&c)[atoms][n][4], Tile<T, C> a, int row_a,
                                        Tile<T, C> b, int row_b, const Overlap& overlap) {
  const typename Mma<T>::template ARows<C> a_tile(a, row_a);
  const typename Mma<T>::template BRows<C> b_tile(b, row_b);
#pragma unroll
  for (int k = 0; k < C; k += Mma<T>::kDepth) {
    typename Mma<T>::A a_frag[atoms];
#pragma unroll
    for (int i = 0; i < atoms; ++i) a_frag[i] = a_tile.at(16 * i, k);
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const auto b_frag = b_tile.at(8 * j, k);
#pragma unroll
      for (int i = 0; i < atoms; ++i)
        k == 0 ? Mma<T>::template multiply<false>(c[i][j], c[i][j + 1], a_frag[i], b_frag)
               : Mma<T>::template multiply<true>(c[i][j], c[i][j + 1], a_frag[i], b_frag);
    }
    overlap(k / Mma<T>::kDepth);
  }
}
template <class T, int atoms, int n, int C>
__device__ inline void mma_abt(float (&c)[atoms][n][4], Tile<T, C> a, int row_a, Tile<T, C> b,
                               int row_b) {
  mma_abt<T>(c, a, row_a, b, row_b, [](int) {});
}

// C [16 atoms, 8 n] += X B: x [16 atoms, 8 m] is an earlier accumulator (float[4] or Rounded), `b`
// starts at `row` and `column`.
template <class T, int atoms, int n, int m, class Sums, int C>
__device__ inline void mma_ab_rs(float (&c)[atoms][n][4], const Sums (&x)[atoms][m], Tile<T, C> b,
                                 int row, int column = 0) {
  const typename Mma<T>::template BColumns<C> b_tile(b, row, column);
#pragma unroll
  for (int k = 0; k < 8 * m / Mma<T>::kDepth; ++k) {
    typename Mma<T>::A a_frag[atoms];
#pragma unroll
    for (int i = 0; i < atoms; ++i) a_frag[i] = Mma<T>::to_a_operand(x[i], k);
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const auto b_frag = b_tile.at(k * Mma<T>::kDepth, 8 * j);
#pragma unroll
      for (int i = 0; i < atoms; ++i)
        Mma<T>::template multiply<true>(c[i][j], c[i][j + 1], a_frag[i], b_frag);
    }
  }
}

// C [16 atoms, 8 n] += A B over k in [k0, k0 + depth): rows of `a` from row_a on, columns of `b`
// from `column` on.
template <int depth, class T, int atoms, int n, int Ca, int C>
__device__ inline void mma_ab_ss(float (&c)[atoms][n][4], Tile<T, Ca> a, int row_a, Tile<T, C> b,
                                 int k0, int column) {
  const typename Mma<T>::template ARows<Ca> a_tile(a, row_a);
  const typename Mma<T>::template BColumns<C> b_tile(b, k0, column);
#pragma unroll
  for (int k = 0; k < depth; k += Mma<T>::kDepth) {
    typename Mma<T>::A a_frag[atoms];
#pragma unroll
    for (int i = 0; i < atoms; ++i) a_frag[i] = a_tile.at(16 * i, k0 + k);
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const auto b_frag = b_tile.at(k, 8 * j);
#pragma unroll
      for (int i = 0; i < atoms; ++i)
        Mma<T>::template multiply<true>(c[i][j], c[i][j + 1], a_frag[i], b_frag);
    }
  }
}

// C [16 atoms, 8 n] = A^T B over the first `depth` rows: columns of `a` from column_a on, columns
// of `b` from column_b on. `add`: +=.
template <int depth, bool add = false, class T, int atoms, int n, int Ca, int C>
__device__ inline void mma_atb(float (&c)[atoms][n][4], Tile<T, Ca> a, int column_a, Tile<T, C> b,
                               int column_b) {
  const typename Mma<T>::template AColumns<Ca> a_tile(a, 0, column_a);
  const typename Mma<T>::template BColumns<C> b_tile(b, 0, column_b);
#pragma unroll
  for (int k = 0; k < depth; k += Mma<T>::kDepth) {
    typename Mma<T>::A a_frag[atoms];
#pragma unroll
    for (int i = 0; i < atoms; ++i) a_frag[i] = a_tile.at(k, 16 * i);
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const auto b_frag = b_tile.at(k, 8 * j);
#pragma unroll
      for (int i = 0; i < atoms; ++i)
        k == 0 && !add ? Mma<T>::template multiply<false>(c[i][j], c[i][j + 1], a_frag[i], b_frag)
                       : Mma<T>::template multiply<true>(c[i][j], c[i][j + 1], a_frag[i], b_frag);
    }
  }
}

}  // namespace horner::attn::kernels::cuda

// Compiled once per instruction set. A task computes a block of C: for each kProductDepth of K it
// packs a strip of B, [K, kStrip], and multiplies the rows of A by it (core/simd/gemm.h).
#include <algorithm>
#include <cstring>

#include "core/simd/gemm.h"
#include "nn/kernels/product.h"

namespace horner::nn::kernels::HORNER_ISA {

namespace vec = simd::HORNER_ISA;
using vec::kWidth, vec::Vec;

inline constexpr int kColumns = kWidth == 16 ? 4 : 2;  // vectors per row of a strip of C
inline constexpr int64_t kStrip = kColumns * kWidth;   // floats per row
static_assert(kProductColumns % kStrip == 0);

static int64_t padded(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// Packs K x N numbers of B as [K, kStrip], padded with zeros.
static void pack_strip(const Matrix& b, int64_t K, int64_t N, float* to) {
  if (b.row == 1 && N == kStrip) {  // columns are contiguous: transpose kWidth x kWidth squares
    int64_t k = 0;
    for (; k + kWidth <= K; k += kWidth)
      for (int64_t n = 0; n < N; n += kWidth) {
        Vec r[kWidth];
        for (int i = 0; i < kWidth; ++i) r[i] = vec::load(b.at + (n + i) * b.column + k);
        vec::transpose(r);
        for (int i = 0; i < kWidth; ++i) vec::store(to + (k + i) * kStrip + n, r[i]);
      }
    for (; k < K; ++k)
      for (int64_t n = 0; n < N; ++n) to[k * kStrip + n] = b.at[n * b.column + k];
    return;
  }
  for (int64_t k = 0; k < K; ++k) {
    if (b.column == 1)
      std::memcpy(to + k * kStrip, b.at + k * b.row, size_t(N) * sizeof(float));
    else
      for (int64_t n = 0; n < N; ++n) to[k * kStrip + n] = b.at[k * b.row + n * b.column];
    std::fill(to + k * kStrip + N, to + (k + 1) * kStrip, 0.f);
  }
}

struct Part {  // of C and of K, multiplied at a time
  int64_t M, K;
  const float* a;
  int64_t a_row;
  const float* strip;  // of B
  float* c;
  int64_t c_row;
};

template <bool Add, int Columns = kColumns>
static void multiply_width(const Part& p, int64_t vectors) {
  if (vectors == Columns)
    return vec::rows<vec::kRows<kColumns>, Columns, Add>(vec::Product{
        p.a, p.a_row, 1, p.strip, kStrip, p.c, p.c_row, int(p.M), Columns * kWidth, int(p.K)});
  if constexpr (Columns > 1) multiply_width<Add, Columns - 1>(p, vectors);
}

// One strip of `width` columns. If these are not whole vectors, C is computed in `edge` and copied.
static void multiply(Part p, int64_t width, bool add, float* edge) {
  const int64_t vectors = padded(width, kWidth) / kWidth;
  float* const c = p.c;
  const int64_t c_row = p.c_row;
  const bool whole = width % kWidth == 0;
  if (!whole) {
    p.c = edge, p.c_row = kStrip;
    for (int64_t m = 0; add && m < p.M; ++m)
      std::memcpy(edge + m * kStrip, c + m * c_row, size_t(width) * sizeof(float));
  }
  add ? multiply_width<true>(p, vectors) : multiply_width<false>(p, vectors);
  for (int64_t m = 0; !whole && m < p.M; ++m)
    std::memcpy(c + m * c_row, edge + m * kStrip, size_t(width) * sizeof(float));
}

static int64_t scratch(const Product& p) {
  return (kProductDepth + p.rows) * kStrip;
}

static void run(const Product& p, int64_t task, float* strip) {
  float* const edge = strip + kProductDepth * kStrip;
  const int64_t m = task % p.tasks_down() * p.rows, n = task / p.tasks_down() * p.columns;
  const int64_t M = std::min(p.rows, p.M - m), N = std::min(p.columns, p.N - n);
  for (int64_t k = 0; k < p.K; k += kProductDepth)
    for (int64_t j = 0; j < N; j += kStrip) {
      const int64_t K = std::min(kProductDepth, p.K - k), width = std::min(kStrip, N - j);
      pack_strip({p.b.at + k * p.b.row + (n + j) * p.b.column, p.b.row, p.b.column}, K, width,
                 strip);
      float* const c = p.c + m * p.c_row + n + j;
      multiply({M, K, p.a + m * p.a_row + k, p.a_row, strip, c, p.c_row}, width, k > 0, edge);
    }
  for (int64_t i = 0; p.bias && i < M; ++i)
    for (int64_t j = 0; j < N; ++j) p.c[(m + i) * p.c_row + n + j] += p.bias[n + j];
}

const ProductKernels product_kernels{scratch, run};

}  // namespace horner::nn::kernels::HORNER_ISA

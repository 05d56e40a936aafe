// C[m, n] = sum_k A[m, k] B(k, n) + bias[n] in float32, on the CPU.
#pragma once

#include <cstdint>

#include "core/simd/isa.h"

namespace horner::nn::kernels {

// The number at (i, j) is at[i * row + j * column].
struct Matrix {
  const float* at;
  int64_t row, column;
};

struct Product {
  int64_t M, N, K;
  const float* a;
  int64_t a_row;
  Matrix b;
  float* c;
  int64_t c_row;
  const float* bias;      // [N], or null
  int64_t rows, columns;  // of C per task; columns are a multiple of kProductColumns

  int64_t tasks_down() const { return (M + rows - 1) / rows; }
  int64_t tasks() const { return tasks_down() * ((N + columns - 1) / columns); }
};
inline constexpr int64_t kProductColumns = 64;
inline constexpr int64_t kProductDepth = 512;  // of K at a time: packed B stays in the cache

struct ProductKernels {
  int64_t (*scratch)(const Product&);  // floats per task
  void (*run)(const Product&, int64_t task, float* scratch);
};
HORNER_PER_ISA(extern const ProductKernels product_kernels;)

}  // namespace horner::nn::kernels

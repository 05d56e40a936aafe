// Products of small matrices in the tensor cores, by one warp: C [16, 8] += A [16, depth] B [depth,
// 8], and how their fragments come from tiles in shared memory.
//
// A thread of lane l holds of C the rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
// 16-bit numbers multiply as they are (depth 16, sums in float32). A float32 is taken as the sum of
// two TF32 numbers, and three of their four products are added: what is lost is 2^-22 of a product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace horner::attn::kernels::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

// A tile in shared memory: rows of C numbers. Chunks of 16 bytes are permuted in each row, so that
// neither eight rows of a chunk nor a row of chunks share a bank.
template <class T, int C>
struct Tile {
  static constexpr int kChunk = 16 / sizeof(T);  // numbers
  static constexpr int kChunks = C / kChunk;
  static constexpr int kMask = kChunks < 8 ? kChunks - 1 : 7;
  uint32_t at;  // shared address

  __device__ uint32_t chunk(int row, int chunk) const {
    return at + uint32_t(row * C * int(sizeof(T)) + ((chunk ^ (row & kMask)) << 4));
  }
  __device__ uint32_t number(int row, int column) const {
    return chunk(row, column / kChunk) + uint32_t(column % kChunk * int(sizeof(T)));
  }
};

__device__ inline int lane() {
  return int(threadIdx.x) & 31;
}
__device__ inline int warp() {
  return int(threadIdx.x) >> 5;
}

__device__ inline void load_matrices(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
__device__ inline void load_transposed(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
__device__ inline uint32_t load_word(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(at) : "memory");
  return x;
}
__device__ inline void store_word(uint32_t at, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(at), "r"(x) : "memory");
}

// Where a lane's rows and chunks lie when four 8 x 8 matrices make up A (its rows first), or two
// neighbours of B.
__device__ inline int a_row() {
  return lane() % 16;
}
__device__ inline int a_chunk() {
  return lane() / 16;
}
__device__ inline int b_row() {
  return lane() % 8 + lane() / 16 * 8;
}
__device__ inline int b_chunk() {
  return lane() / 8 % 2;
}

__device__ inline uint32_t pair(bf16, float a, float b) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&p);
}
__device__ inline uint32_t pair(fp16, float a, float b) {
  const __half2 p = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&p);
}

// 16-bit numbers.
template <class T>
struct Mma {
  static constexpr int kDepth = 16;
  struct A {
    uint32_t x[4];
  };
  struct B {  // of two neighbours: [depth, 16]
    uint32_t x[4];
  };

  // Of a tile whose rows are those of A, or the columns of B.
  template <int C>
  static __device__ A a_of_rows(Tile<T, C> t, int row, int column) {
    A a;
    load_matrices(a.x, t.chunk(row + a_row(), column / 8 + a_chunk()));
    return a;
  }
  template <int C>
  static __device__ B b_of_rows(Tile<T, C> t, int row, int column) {
    B b;
    load_matrices(b.x, t.chunk(row + b_row(), column / 8 + b_chunk()));
    return b;
  }
  // Of a tile whose columns are the rows of A, or whose rows are those of B.
  template <int C>
  static __device__ A a_of_columns(Tile<T, C> t, int row, int column) {
    A a;
    load_transposed(a.x, t.chunk(row + b_row(), column / 8 + b_chunk()));
    return a;
  }
  template <int C>
  static __device__ B b_of_columns(Tile<T, C> t, int row, int column) {
    B b;
    load_transposed(b.x, t.chunk(row + a_row(), column / 8 + a_chunk()));
    return b;
  }
  // Of the sums of an earlier product, columns [16 i, 16 i + 16).
  static __device__ A a_of_sums(const float (*c)[4], int i) {
    const float *c0 = c[2 * i], *c1 = c[2 * i + 1];
    return {{pair(T(), c0[0], c0[1]), pair(T(), c0[2], c0[3]), pair(T(), c1[0], c1[1]),
             pair(T(), c1[2], c1[3])}};
  }
  // Writes them to a tile, at their place.
  template <int C>
  static __device__ void store(Tile<T, C> t, int row, int column, const float (&c)[4]) {
    const int r = row + lane() / 4, at = column + lane() % 4 * 2;
    store_word(t.number(r, at), pair(T(), c[0], c[1]));
    store_word(t.number(r + 8, at), pair(T(), c[2], c[3]));
  }
  static __device__ void multiply(float (&c)[4], const A& a, uint32_t b0, uint32_t b1);
  static __device__ void multiply(float (&c0)[4], float (&c1)[4], const A& a, const B& b) {
    multiply(c0, a, b.x[0], b.x[1]);
    multiply(c1, a, b.x[2], b.x[3]);
  }
};

template <>
__device__ inline void Mma<bf16>::multiply(float (&c)[4], const A& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void Mma<fp16>::multiply(float (&c)[4], const A& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

// float32. Where a product runs over the columns of sums or over the rows of a tile, those are
// taken in the order 0 2 4 6 1 3 5 7: the order in which a thread holds them.
template <>
struct Mma<float> {
  static constexpr int kDepth = 8;
  struct A {
    uint32_t high[4], low[4];
  };
  struct B {
    uint32_t high[4], low[4];
  };

  static __device__ uint32_t tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(y) : "f"(x));
    return y;
  }
  template <class Fragment>
  static __device__ Fragment split(const uint32_t (&x)[4]) {
    Fragment f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y = __uint_as_float(x[i]);
      f.high[i] = tf32(y);
      f.low[i] = tf32(y - __uint_as_float(f.high[i]));
    }
    return f;
  }
  template <int C>
  static __device__ A a_of_rows(Tile<float, C> t, int row, int column) {
    uint32_t x[4];
    load_matrices(x, t.chunk(row + a_row(), column / 4 + a_chunk()));
    return split<A>(x);
  }
  template <int C>
  static __device__ B b_of_rows(Tile<float, C> t, int row, int column) {
    uint32_t x[4];
    load_matrices(x, t.chunk(row + b_row(), column / 4 + b_chunk()));
    return split<B>(x);
  }
  template <int C>
  static __device__ A a_of_columns(Tile<float, C> t, int row, int column) {
    const int r = row + lane() % 4 * 2, c = column + lane() / 4;
    const uint32_t x[4] = {load_word(t.number(r, c)), load_word(t.number(r, c + 8)),
                           load_word(t.number(r + 1, c)), load_word(t.number(r + 1, c + 8))};
    return split<A>(x);
  }
  template <int C>
  static __device__ B b_of_columns(Tile<float, C> t, int row, int column) {
    const int r = row + lane() % 4 * 2, c = column + lane() / 4;
    const uint32_t x[4] = {load_word(t.number(r, c)), load_word(t.number(r + 1, c)),
                           load_word(t.number(r, c + 8)), load_word(t.number(r + 1, c + 8))};
    return split<B>(x);
  }
  static __device__ A a_of_sums(const float (*c)[4], int i) {
    const float* y = c[i];
    const uint32_t x[4] = {__float_as_uint(y[0]), __float_as_uint(y[2]), __float_as_uint(y[1]),
                           __float_as_uint(y[3])};
    return split<A>(x);
  }
  template <int C>
  static __device__ void store(Tile<float, C> t, int row, int column, const float (&c)[4]) {
    const int r = row + lane() / 4, at = column + lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_word(t.number(r + i / 2 * 8, at + i % 2), __float_as_uint(c[i]));
  }
  static __device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  // The cores cut their sums off; added here, they are rounded.
  static __device__ void multiply(float (&c)[4], const A& a, const B& b, int i) {
    float sum[4] = {};
    multiply(sum, a.low, b.high[i], b.high[i + 1]);
    multiply(sum, a.high, b.low[i], b.low[i + 1]);
    multiply(sum, a.high, b.high[i], b.high[i + 1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) c[j] += sum[j];
  }
  static __device__ void multiply(float (&c0)[4], float (&c1)[4], const A& a, const B& b) {
    multiply(c0, a, b, 0);
    multiply(c1, a, b, 2);
  }
};

// C [16 atoms, 8 n] += rows of `a` from row_a on, times rows of `b` from row_b on, transposed.
template <class T, int atoms, int n, int C>
__device__ inline void add_rows_by_rows(float (&c)[atoms][n][4], Tile<T, C> a, int row_a,
                                        Tile<T, C> b, int row_b) {
#pragma unroll
  for (int k = 0; k < C; k += Mma<T>::kDepth) {
    typename Mma<T>::A left[atoms];
#pragma unroll
    for (int i = 0; i < atoms; ++i) left[i] = Mma<T>::a_of_rows(a, row_a + 16 * i, k);
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const auto right = Mma<T>::b_of_rows(b, row_b + 8 * j, k);
#pragma unroll
      for (int i = 0; i < atoms; ++i) Mma<T>::multiply(c[i][j], c[i][j + 1], left[i], right);
    }
  }
}

// C [16 atoms, 8 n] += x [16 atoms, 8 m], sums of an earlier product, times rows of `b` from row
// on, its columns from `column` on.
template <class T, int atoms, int n, int m, int C>
__device__ inline void add_sums_by_columns(float (&c)[atoms][n][4], const float (&x)[atoms][m][4],
                                           Tile<T, C> b, int row, int column = 0) {
#pragma unroll
  for (int k = 0; k < 8 * m / Mma<T>::kDepth; ++k) {
    typename Mma<T>::A left[atoms];
#pragma unroll
    for (int i = 0; i < atoms; ++i) left[i] = Mma<T>::a_of_sums(x[i], k);
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const auto right = Mma<T>::b_of_columns(b, row + k * Mma<T>::kDepth, column + 8 * j);
#pragma unroll
      for (int i = 0; i < atoms; ++i) Mma<T>::multiply(c[i][j], c[i][j + 1], left[i], right);
    }
  }
}

}  // namespace horner::attn::kernels::cuda

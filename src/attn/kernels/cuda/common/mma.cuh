// Tensor-core products of one warp, C [16, 8] += A [16, depth] B [depth, 8], and fragment loads
// from tiles in shared memory.
//
// Lane l holds rows l / 4 and l / 4 + 8 of C, columns 2 (l % 4) and the next. 16-bit operands are
// multiplied directly (depth 16, float32 accumulators). A float32 is split into three 8-bit parts;
// eight of their nine products are added, the ninth is below 2^-30 of the whole.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace horner::attn::kernels::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

// A tile in shared memory: rows of C elements. 16-byte chunks are swizzled in each row, so that
// neither one chunk of eight rows nor the chunks of one row conflict in banks.
template <class T, int C>
struct Tile {
  static constexpr int kChunk = 16 / sizeof(T);  // elements
  static constexpr int kChunks = C / kChunk;
  static constexpr int kMask = kChunks < 8 ? kChunks - 1 : 7;
  static constexpr int kRow = C * int(sizeof(T));  // bytes
  uint32_t at;                                     // shared address, a multiple of kRow

  __device__ uint32_t chunk(int row, int chunk) const {
    return at + uint32_t(row * kRow + ((chunk ^ (row & kMask)) << 4));
  }
  __device__ uint32_t element(int row, int column) const {
    return chunk(row, column / kChunk) + uint32_t(column % kChunk * int(sizeof(T)));
  }
  // Moves a lane's address within the first rows and chunks by `rows` (a multiple of 8) and
  // `columns` (a multiple of two chunks): with constants, one instruction for all rows.
  static __device__ uint32_t advance(uint32_t lane, int rows, int columns) {
    return (lane ^ uint32_t(columns / kChunk << 4)) + uint32_t(rows * kRow);
  }
};

__device__ inline int lane() {
  return int(threadIdx.x) & 31;
}
__device__ inline int warp() {
  return int(threadIdx.x) >> 5;
}

__device__ inline void ldmatrix(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
__device__ inline void ldmatrix_trans(uint32_t (&x)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at)
               : "memory");
}
#if __CUDA_ARCH__ >= 900
__device__ inline void stmatrix(uint32_t at, const uint32_t (&x)[2], const uint32_t (&y)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(at),
               "r"(x[0]), "r"(x[1]), "r"(y[0]), "r"(y[1])
               : "memory");
}
#endif
__device__ inline uint32_t load_word(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(at) : "memory");
  return x;
}
__device__ inline void store_word(uint32_t at, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(at), "r"(x) : "memory");
}

// The row and chunk that a lane addresses for ldmatrix.x4: four 8 x 8 matrices form A (rows first),
// or two adjacent B fragments.
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

__device__ inline uint32_t pack2(bf16, float a, float b) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&p);
}
__device__ inline uint32_t pack2(fp16, float a, float b) {
  const __half2 p = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&p);
}
__device__ inline float2 unpack2(bf16, uint32_t two) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
}
__device__ inline float2 unpack2(fp16, uint32_t two) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}

// bf16 and fp16.
template <class T>
struct Mma {
  static constexpr int kDepth = 16;
  struct A {
    uint32_t x[4];
  };
  struct B {  // two adjacent fragments: [depth, 16]
    uint32_t x[4];
  };

  // Fragment loaders, from row `first` of a tile on. Its rows are rows of A, or columns of B.
  template <int C>
  struct ARows {
    uint32_t lane_at;
    __device__ ARows(Tile<T, C> t, int first) : lane_at(t.chunk(first + a_row(), a_chunk())) {}
    __device__ A at(int row, int column) const {
      A a;
      ldmatrix(a.x, Tile<T, C>::advance(lane_at, row, column));
      return a;
    }
  };
  template <int C>
  struct BRows {
    uint32_t lane_at;
    __device__ BRows(Tile<T, C> t, int first) : lane_at(t.chunk(first + b_row(), b_chunk())) {}
    __device__ B at(int row, int column) const {
      B b;
      ldmatrix(b.x, Tile<T, C>::advance(lane_at, row, column));
      return b;
    }
  };
  // Transposed loaders, from `column` on. Tile columns are rows of A, or tile rows are rows of B.
  template <int C>
  struct AColumns {
    uint32_t lane_at;
    __device__ AColumns(Tile<T, C> t, int first, int column)
        : lane_at(t.chunk(first + b_row(), column / 8 + b_chunk())) {}
    __device__ A at(int row, int column) const {
      A a;
      ldmatrix_trans(a.x, Tile<T, C>::advance(lane_at, row, column));
      return a;
    }
  };
  template <int C>
  struct BColumns {
    uint32_t lane_at;
    __device__ BColumns(Tile<T, C> t, int first, int column)
        : lane_at(t.chunk(first + a_row(), column / 8 + a_chunk())) {}
    __device__ B at(int row, int column) const {
      B b;
      ldmatrix_trans(b.x, Tile<T, C>::advance(lane_at, row, column));
      return b;
    }
  };
  // An accumulator [16, 8] of an earlier product, rounded to an operand.
  struct Rounded {
    uint32_t x[2];
  };
  static __device__ Rounded rounded(const float (&c)[4]) {
    return {{pack2(T(), c[0], c[1]), pack2(T(), c[2], c[3])}};
  }
  // Keeps the elements whose bit is set, zeroes the others.
  static __device__ void keep(Rounded& c, uint32_t bits) {
    c.x[0] &= (bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0);
    c.x[1] &= (bits & 4 ? 0xffffu : 0) | (bits & 8 ? 0xffff0000u : 0);
  }
  // Columns [16 i, 16 i + 16) of an accumulator as an A operand.
  static __device__ A to_a_operand(const Rounded* c, int i) {
    const uint32_t *c0 = c[2 * i].x, *c1 = c[2 * i + 1].x;
    return {{c0[0], c0[1], c1[0], c1[1]}};
  }
  static __device__ A to_a_operand(const float (*c)[4], int i) {
    const Rounded both[2] = {rounded(c[2 * i]), rounded(c[2 * i + 1])};
    return to_a_operand(both, 0);
  }
  // Writes two adjacent accumulators to a tile.
  template <int C>
  struct Writer {
    uint32_t lane_at;
#if __CUDA_ARCH__ >= 900
    __device__ Writer(Tile<T, C> t, int first) : lane_at(t.chunk(first + a_row(), a_chunk())) {}
    __device__ void put(int row, int column, const Rounded* c) const {
      stmatrix(Tile<T, C>::advance(lane_at, row, column), c[0].x, c[1].x);
    }
#else
    __device__ Writer(Tile<T, C> t, int first)
        : lane_at(t.element(first + lane() / 4, lane() % 4 * 2)) {}
    __device__ void put(int row, int column, const Rounded* c) const {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_word(Tile<T, C>::advance(lane_at, row + i % 2 * 8, column + i / 2 * 8),
                   c[i / 2].x[i % 2]);
    }
#endif
  };
  // d = a b + c
  static __device__ void multiply(float (&d)[4], const A& a, uint32_t b0, uint32_t b1,
                                  const float* c);
  // Adds to two adjacent accumulators, or sets them.
  template <bool Add>
  static __device__ void multiply(float (&c0)[4], float (&c1)[4], const A& a, const B& b) {
    constexpr float kZeros[4] = {};
    multiply(c0, a, b.x[0], b.x[1], Add ? c0 : kZeros);
    multiply(c1, a, b.x[2], b.x[3], Add ? c1 : kZeros);
  }
};

template <>
__device__ inline void Mma<bf16>::multiply(float (&d)[4], const A& a, uint32_t b0, uint32_t b1,
                                           const float* c) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}
template <>
__device__ inline void Mma<fp16>::multiply(float (&d)[4], const A& a, uint32_t b0, uint32_t b1,
                                           const float* c) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// float32. A product over accumulator columns or tile rows takes them in the order 0 2 4 6 1 3 5 7,
// in which a thread holds them.
template <>
struct Mma<float> {
  static constexpr int kDepth = 8;
  struct A {
    uint32_t high[4], middle[4], low[4];
  };
  struct B {
    uint32_t high[4], middle[4], low[4];
  };

  static __device__ uint32_t eight_bits(float x) { return __float_as_uint(x) & 0xffff0000u; }
  template <class Fragment>
  static __device__ Fragment split(const uint32_t (&x)[4]) {
    Fragment f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float y = __uint_as_float(x[i]);
      f.high[i] = eight_bits(y);
      const float rest = y - __uint_as_float(f.high[i]);
      f.middle[i] = eight_bits(rest);
      f.low[i] = __float_as_uint(rest - __uint_as_float(f.middle[i]));
    }
    return f;
  }
  template <int C>
  struct ARows {
    uint32_t lane_at;
    __device__ ARows(Tile<float, C> t, int first) : lane_at(t.chunk(first + a_row(), a_chunk())) {}
    __device__ A at(int row, int column) const {
      uint32_t x[4];
      ldmatrix(x, Tile<float, C>::advance(lane_at, row, column));
      return split<A>(x);
    }
  };
  template <int C>
  struct BRows {
    uint32_t lane_at;
    __device__ BRows(Tile<float, C> t, int first) : lane_at(t.chunk(first + b_row(), b_chunk())) {}
    __device__ B at(int row, int column) const {
      uint32_t x[4];
      ldmatrix(x, Tile<float, C>::advance(lane_at, row, column));
      return split<B>(x);
    }
  };
  // A lane's two rows, and in each the elements eight columns apart.
  template <int C>
  struct Columns {
    uint32_t even, odd;
    __device__ Columns(Tile<float, C> t, int first, int column)
        : even(t.element(first + lane() % 4 * 2, column + lane() / 4)),
          odd(t.element(first + lane() % 4 * 2 + 1, column + lane() / 4)) {}
    __device__ uint32_t element(int i, int row, int column) const {
      return load_word(Tile<float, C>::advance(i % 2 ? odd : even, row, column + i / 2 * 8));
    }
  };
  template <int C>
  struct AColumns : Columns<C> {
    using Columns<C>::Columns;
    __device__ A at(int row, int column) const {
      const uint32_t x[4] = {this->element(0, row, column), this->element(2, row, column),
                             this->element(1, row, column), this->element(3, row, column)};
      return split<A>(x);
    }
  };
  template <int C>
  struct BColumns : Columns<C> {
    using Columns<C>::Columns;
    __device__ B at(int row, int column) const {
      const uint32_t x[4] = {this->element(0, row, column), this->element(1, row, column),
                             this->element(2, row, column), this->element(3, row, column)};
      return split<B>(x);
    }
  };
  struct Rounded {
    float x[4];
  };
  static __device__ Rounded rounded(const float (&c)[4]) { return {{c[0], c[1], c[2], c[3]}}; }
  static __device__ void keep(Rounded& c, uint32_t bits) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c.x[i] = bits >> i & 1 ? c.x[i] : 0;
  }
  static __device__ A to_a_operand(const Rounded* c, int i) { return to_a_operand(&c[i].x, 0); }
  static __device__ A to_a_operand(const float (*c)[4], int i) {
    const float* y = c[i];
    const uint32_t x[4] = {__float_as_uint(y[0]), __float_as_uint(y[2]), __float_as_uint(y[1]),
                           __float_as_uint(y[3])};
    return split<A>(x);
  }
  template <int C>
  struct Writer {
    uint32_t lane_at;  // two adjacent elements share a chunk
    __device__ Writer(Tile<float, C> t, int first)
        : lane_at(t.element(first + lane() / 4, lane() % 4 * 2)) {}
    __device__ void put(int row, int column, const Rounded* c) const {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        store_word(Tile<float, C>::advance(lane_at, row + i / 2 % 2 * 8, column + i / 4 * 8) +
                       uint32_t(i % 2 * 4),
                   __float_as_uint(c[i / 4].x[i % 4]));
    }
  };
  static __device__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  // Tensor cores truncate their sums. The high parts' products have few enough bits to be summed
  // exactly; the others are small, and the additions here round.
  template <bool Add>
  static __device__ void multiply(float (&c)[4], const A& a, const B& b, int i) {
    float large[4] = {}, small[4] = {};
    multiply(small, a.low, b.middle[i], b.middle[i + 1]);
    multiply(small, a.middle, b.low[i], b.low[i + 1]);
    multiply(small, a.low, b.high[i], b.high[i + 1]);
    multiply(small, a.high, b.low[i], b.low[i + 1]);
    multiply(small, a.middle, b.middle[i], b.middle[i + 1]);
    multiply(small, a.middle, b.high[i], b.high[i + 1]);
    multiply(small, a.high, b.middle[i], b.middle[i + 1]);
    multiply(large, a.high, b.high[i], b.high[i + 1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) c[j] = (Add ? c[j] : 0) + (large[j] + small[j]);
  }
  template <bool Add>
  static __device__ void multiply(float (&c0)[4], float (&c1)[4], const A& a, const B& b) {
    multiply<Add>(c0, a, b, 0);
    multiply<Add>(c1, a, b, 2);
  }
};

}  // namespace horner::attn::kernels::cuda

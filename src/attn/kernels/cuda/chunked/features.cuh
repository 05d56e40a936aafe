// Monomial features as A operands of a warp, sixteen at a time, and the column z of a state.
#pragma once

#include "attn/kernels/cuda/chunked/chunked.h"
#include "attn/kernels/cuda/common/tiles.cuh"

namespace horner::attn::kernels::cuda {

template <int n>
HORNER_HD Vec<n> weights_of(const Quadratic& w, const Vec<n>& x) {
  return vec<n>([&](int i) { return (w.c[2] * x[i] + w.c[1]) * x[i] + w.c[0]; });
}
template <int n>
HORNER_HD Slope<Vec<n>> slopes_of(const Quadratic& w, const Vec<n>& x) {
  return {weights_of(w, x), vec<n>([&](int i) { return 2 * w.c[2] * x[i] + w.c[1]; })};
}

// The monomials of a tile: x_j for j in `block`, times x_i unless i < 0.
struct Monomials {
  int i, block;
};
// Products come first, sixteen tiles per pair of blocks; then the channels themselves.
HORNER_HD Monomials monomials(int tile, int tiles, int blocks) {
  int rest = tile - (tiles - blocks), first = 0;
  if (rest >= 0) return {-1, rest};
  for (rest = tile; rest >= 16 * (blocks - first); ++first) rest -= 16 * (blocks - first);
  return {16 * first + rest % 16, first + rest / 16};
}
// A product of two different blocks counts for both orders.
HORNER_HD float coefficient(const Quadratic& w, float scale, const Monomials& m) {
  if (m.i < 0) return w.c[1] * scale;
  return w.c[2] * scale * scale * (m.i / 16 == m.block ? 1 : 2);
}

__device__ inline uint32_t mul2(bf16, uint32_t a, uint32_t b) {
  const auto y = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&y);
}
__device__ inline uint32_t relu(uint32_t two) {  // two bf16
  const auto y = __hmax2_nan(*reinterpret_cast<const __nv_bfloat162*>(&two), __nv_bfloat162{0, 0});
  return *reinterpret_cast<const uint32_t*>(&y);
}
__device__ inline uint32_t where_positive(uint32_t of, uint32_t x) {  // 0 elsewhere
  return of & __hgt2_mask(*reinterpret_cast<const __nv_bfloat162*>(&x), __nv_bfloat162{0, 0});
}
__device__ inline uint32_t broadcast2(bf16, uint32_t at) {  // one bf16, in both halves
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(x) : "r"(at) : "memory");
  return uint32_t(x) * 0x10001u;
}
__device__ inline float2 unpack2(uint32_t two) {  // two bf16
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
}
__device__ inline float load_element(bf16, uint32_t at) {
  return unpack2(broadcast2(bf16(), at)).x;
}
__device__ inline float load_element(float, uint32_t at) {
  return __uint_as_float(load_word(at));
}
__device__ inline float2 load_pair(bf16, uint32_t at) {
  return unpack2(load_word(at));
}
__device__ inline float2 load_pair(float, uint32_t at) {
  return {__uint_as_float(load_word(at)), __uint_as_float(load_word(at + 4))};
}

// What depends on the dtype. Tokens and features within a step are in mma.cuh's fragment order.
template <class T>
struct Features;
template <>
struct Features<bf16> {
  using M = Mma<bf16>;
  static __device__ M::A constant() {  // one row of 1, fifteen of 0
    const uint32_t ones = lane() < 4 ? 0x3f803f80u : 0;
    return {{ones, 0, ones, 0}};
  }
  // B operand of one column in bf16, with its rounding error in the next column.
  static __device__ M::B column(const float* of) {
    const float* at = of + lane() % 4 * 2;
    const auto word = [&](float a, float b) {
      const uint32_t high = pack2(bf16(), a, b);
      const float2 h = unpack2(high);
      return lane() < 4 ? high : lane() < 8 ? pack2(bf16(), a - h.x, b - h.y) : 0;
    };
    return {{word(at[0], at[1]), word(at[8], at[9]), 0, 0}};
  }
  // Only the first two columns of its product count: those of lanes divisible by four.
  static __device__ M::B stored_column(uint32_t z, int) {
    const uint32_t at = z + uint32_t(lane() / 4 % 2 * 32 + lane() % 4 * 4);
    return {{load_word(at), load_word(at + 16), 0, 0}};
  }
  static __device__ void add_column(float (&c)[4], const M::A& a, const M::B& b) {
    M::multiply(c, a, b.x[0], b.x[1], c);
  }
  static __device__ float2 stored_pair(uint32_t z, int feature) {
    const float2 high = load_pair(bf16(), z + 2 * feature);
    const float2 low = load_pair(bf16(), z + 32 + 2 * feature);
    return {high.x + low.x, high.y + low.y};
  }
  static __device__ void store_column(uint32_t* z, int feature, float a, float b) {
    const uint32_t high = pack2(bf16(), a, b);
    z[feature / 2] = high;
    z[8 + feature / 2] = pack2(bf16(), a - unpack2(high).x, b - unpack2(high).y);
  }
};
template <>
struct Features<float> {
  using M = Mma<float>;
  static __device__ float element(Tile<float, 64> x, int row, int column) {
    return load_element(0.f, x.element(row, column));
  }
  static __device__ M::A split(float a, float b, float c, float d) {
    const uint32_t x[4] = {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c),
                           __float_as_uint(d)};
    return M::split<M::A>(x);
  }
  // A operand of sixteen tokens, rows of x from `row`; half of the monomials per step.
  static __device__ M::A rows(Tile<float, 64> x, int row, const Monomials& m, int step) {
    const int t = row + lane() / 4, j = 16 * m.block + 8 * step + lane() % 4 * 2;
    const float upper = m.i < 0 ? 1 : element(x, t, m.i);
    const float lower = m.i < 0 ? 1 : element(x, t + 8, m.i);
    return split(element(x, t, j) * upper, element(x, t + 8, j) * lower,
                 element(x, t, j + 1) * upper, element(x, t + 8, j + 1) * lower);
  }
  // Transposed: monomials by eight tokens.
  static __device__ M::A columns(Tile<float, 64> x, int row, const Monomials& m) {
    const int t = row + lane() % 4 * 2, j = 16 * m.block + lane() / 4;
    const float even = m.i < 0 ? 1 : element(x, t, m.i), odd = m.i < 0 ? 1 : element(x, t + 1, m.i);
    return split(element(x, t, j) * even, element(x, t, j + 8) * even, element(x, t + 1, j) * odd,
                 element(x, t + 1, j + 8) * odd);
  }
  static __device__ M::A constant() {
    const float one = lane() < 4 ? 1 : 0;
    return split(one, 0, one, 0);
  }
  static __device__ M::B of_column(float even, float odd) {
    uint32_t x[4] = {};
    if (lane() < 4) x[0] = __float_as_uint(even), x[1] = __float_as_uint(odd);
    return M::split<M::B>(x);
  }
  static __device__ M::B column(const float* of) {
    return of_column(of[lane() % 4 * 2], of[lane() % 4 * 2 + 1]);
  }
  static __device__ M::B stored_column(uint32_t z, int step) {
    const float2 y = load_pair(0.f, z + uint32_t(32 * step + lane() % 4 * 8));
    return of_column(y.x, y.y);
  }
  static __device__ void add_column(float (&c)[4], const M::A& a, const M::B& b) {
    M::multiply<true>(c, a, b, 0);
  }
  static __device__ float2 stored_pair(uint32_t z, int feature) {
    return load_pair(0.f, z + 4 * feature);
  }
  static __device__ void store_column(uint32_t* z, int feature, float a, float b) {
    z[feature] = __float_as_uint(a), z[feature + 1] = __float_as_uint(b);
  }
};

// Running sum of the log gates through token t; 0 before the first token.
__device__ inline double gates_to(const Fused& f, int key_head, int t) {
  return t < 0 ? 0 : f.decay[int64_t(key_head) * f.S + t];
}

}  // namespace horner::attn::kernels::cuda

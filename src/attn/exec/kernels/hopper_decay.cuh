// Decay on Hopper. With c the running sums of the log gates, in double, and c_ref that of the first
// of a tile of keys, a weight is multiplied by
//   exp(c_t - c_s) = 2^(row + key),   row = log2(e) (c_t - c_ref),   key = log2(e) (c_ref - c_s)
// Both are taken in double and rounded to float: their sum is never above 0 where t sees s, and it
// is added before the exponential, so that nothing overflows between two keys far apart in c.
#pragma once

#include "attn/exec/kernels/fused_cuda_tiles.cuh"
#include "attn/exec/kernels/hopper_cuda.h"

namespace horner::attn::kernels::cuda {

// A weight with decay, for kernels of its own.
template <class W>
struct Decaying {
  W of;
  const float* fades;  // key, [B, G, fade_keys()]
};
template <class W>
inline constexpr bool kDecays = false;
template <class W>
inline constexpr bool kDecays<Decaying<W>> = true;

template <class W>
HORNER_HD const W& undecayed(const W& w) {
  return w;
}
template <class W>
HORNER_HD const W& undecayed(const Decaying<W>& w) {
  return w.of;
}
template <class W>
using Undecayed = std::remove_cvref_t<decltype(undecayed(std::declval<W>()))>;
template <class W>
inline constexpr bool kIsExp = std::is_same_v<Undecayed<W>, Exp>;

// Of the polynomials that fade, those up to degree 2 have code of their own.
HORNER_HD int degree_of(const Decaying<Polynomial>& w) {
  return w.of.degree <= 2 ? w.of.degree : 0;
}
template <class F>
HORNER_HD void with_degree(const Decaying<Exp>& w, int, const F& f) {
  f(w.of);
}
template <class F>
HORNER_HD void with_degree(const Decaying<Polynomial>& w, int degree, const F& f) {
  if (degree == 1 || degree == 2) return f(OfDegree<2>{w.of});
  f(OfDegree<0>{w.of});
}

template <class W>
__device__ inline const float* fades_of(const Fused& f, const W& w, const Head& head) {
  return w.fades + int64_t(head.b * f.G + head.g) * fade_keys(f);
}
// row, from c_t and c_ref.
__device__ inline float fade_of_row(double query, double from) {
  return float(query - from) * kLog2e;
}

struct NoFade {
  static constexpr bool kThere = false;
};
// Of a tile of keys and the two rows of a thread, forward.
struct TileFade {
  static constexpr bool kThere = true;
  uint32_t keys;  // in shared memory
  float row[2];

  __device__ float2 of_keys(int column) const {  // the thread's two of eight
    float2 y;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
                 : "=f"(y.x), "=f"(y.y)
                 : "r"(keys + uint32_t(column * 32 + lane() % 4 * 8))
                 : "memory");
    return y;
  }
  // x = exp(scale x - sub) and its fade, with a scale in units of ln 2.
  template <int columns>
  __device__ __forceinline__ void weigh(float (&x)[columns][4], float scale,
                                        const float (&sub)[2]) const {
    const float by[2] = {row[0] - sub[0] * kLog2e, row[1] - sub[1] * kLog2e};
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      const float2 key = of_keys(j);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[j][i] = exp2_fast(x[j][i] * scale + (i % 2 ? key.y : key.x) + by[i / 2]);
    }
  }
  template <int columns>
  __device__ __forceinline__ void multiply(float (&x)[columns][4]) const {
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      const float2 key = of_keys(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] *= exp2_fast((i % 2 ? key.y : key.x) + row[i / 2]);
    }
  }
};
// The rows of a thread, `first` and 8 further, of those from t0 on: c_t - c_ref is taken as c_t -
// c_t0 and c_t0 - c_ref, so that no doubles are kept.
template <bool decays>
struct RowFades {
  __device__ RowFades(const Fused&, const Head&, int, int) {}
  __device__ int load(const Fused&, const Head&, int, int) const { return 0; }
  __device__ int from(int x) const { return x; }
  __device__ NoFade of_tile(uint32_t, int) const { return {}; }
};
template <>
struct RowFades<true> {
  float row[2];

  __device__ RowFades(const Fused& f, const Head& head, int t0, int first) : row{} {
    for (int i = 0; i < 2 && f.S > 0; ++i)
      row[i] = fade_of_row(gates_at_query(f, head, first + 8 * i), gates_at_query(f, head, t0));
  }
  // For the tile that begins with key s0: on their way beside a product, then used.
  __device__ double2 load(const Fused& f, const Head& head, int t0, int s0) const {
    return {gates_at_query(f, head, t0), gates_at_key(f, head, s0 / kFadeTile * kFadeTile)};
  }
  __device__ float from(const double2& c) const { return fade_of_row(c.x, c.y); }
  __device__ TileFade of_tile(uint32_t keys, float from) const {
    return {keys, {row[0] + from, row[1] + from}};
  }
};

// The keys of a thread, `first` and 8 further, backward.
template <bool decays>
struct KeyFades {
  template <class W>
  __device__ KeyFades(const Fused&, const W&, const Head&, int) {}
};
template <>
struct KeyFades<true> {
  float of[2];

  template <class W>
  __device__ KeyFades(const Fused& f, const W& w, const Head& head, int first)
      : of{fades_of(f, w, head)[first], fades_of(f, w, head)[first + 8]} {}
};
// Two queries of a lane, backward: c_t - c_ref.
template <bool decays>
struct QueryFades {
  __device__ void load(const Fused&, const Head&, int, int) {}
  __device__ float row(int, double) const { return 0; }
};
template <>
struct QueryFades<true> {
  double c[2];

  __device__ void load(const Fused& f, const Head& head, int i, int t) {
    c[i] = gates_at_query(f, head, t);
  }
  __device__ float row(int i, double from) const { return fade_of_row(c[i], from); }
};

}  // namespace horner::attn::kernels::cuda

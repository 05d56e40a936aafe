// Loads and stores of float32 and bfloat16 rows as vectors of floats, including partial vectors.
#pragma once

#include <cstring>

#include "core/simd/vec.h"

namespace horner::nn::kernels::HORNER_ISA {

namespace vec = simd::HORNER_ISA;
using vec::Vec, vec::VecInt, vec::kWidth, vec::splat;

typedef uint16_t VecHalf __attribute__((vector_size(kWidth * 2)));
typedef uint32_t VecWord __attribute__((vector_size(kWidth * 4)));

struct Bfloat16 {
  uint16_t bits;
};
struct All {};  // all lanes; otherwise an int is the number of lanes

inline Vec widen(VecHalf x) {
  return reinterpret_cast<Vec>(__builtin_convertvector(x, VecWord) << 16);
}
inline VecHalf narrow(Vec x) {  // to nearest, ties to even; NaN stays NaN
  const VecWord bits = reinterpret_cast<VecWord>(x);
  const VecWord rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const VecWord kept = (x == x) ? rounded : (bits >> 16) | 0x40;
  return __builtin_convertvector(kept, VecHalf);
}

inline Vec get(const float* p, All) {
  return vec::load(p);
}
inline void put(float* p, Vec x, All) {
  vec::store(p, x);
}
inline Vec get(const Bfloat16* p, All) {
  VecHalf x;
  std::memcpy(&x, p, sizeof x);
  return widen(x);
}
inline void put(Bfloat16* p, Vec x, All) {
  const VecHalf y = narrow(x);
  std::memcpy(p, &y, sizeof y);
}
template <class T>
inline Vec get(const T* p, int n) {  // zeros in the other lanes
  T some[kWidth] = {};
  std::memcpy(some, p, size_t(n) * sizeof(T));
  return get(some, All{});
}
template <class T>
inline void put(T* p, Vec x, int n) {
  T some[kWidth];
  put(some, x, All{});
  std::memcpy(p, some, size_t(n) * sizeof(T));
}
inline Vec only(Vec x, All) {
  return x;
}
inline Vec only(Vec x, int n) {  // zeros in the other lanes
  return vec::choose(vec::lanes(0) < n, x, Vec{});
}

// Calls f(index, lanes) over n numbers.
template <class F>
inline void over(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) f(i, All{});
  if (i < n) f(i, int(n - i));
}

}  // namespace horner::nn::kernels::HORNER_ISA

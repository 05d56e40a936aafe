// From scores to weights and score gradients, on the elements of one thread. attn/math.h defines
// weights of a single score; weights of the whole row are here, given their RowThreshold. With dw
// the gradient of a weight,
//   dx_s = slope_s dw_s - column_s sum_r row_r dw_r
#pragma once

#include <type_traits>

#include "attn/kernels/cuda/common/problem.h"

namespace horner::attn::kernels::cuda {

// Elements of one thread, in registers.
template <int n>
struct Vec {
  float v[n];
  HORNER_HD float& operator[](int i) { return v[i]; }
  HORNER_HD float operator[](int i) const { return v[i]; }
};

template <int n, class F>
HORNER_HD Vec<n> vec(const F& f) {  // f(0), f(1), ...
  Vec<n> y;
#pragma unroll
  for (int i = 0; i < n; ++i) y[i] = f(i);
  return y;
}
template <int n>
HORNER_HD Vec<n> operator+(Vec<n> a, Vec<n> b) {
  return vec<n>([&](int i) { return a[i] + b[i]; });
}
template <int n>
HORNER_HD Vec<n> operator*(Vec<n> a, Vec<n> b) {
  return vec<n>([&](int i) { return a[i] * b[i]; });
}
template <int n>
HORNER_HD Vec<n> operator+(Vec<n> a, float b) {
  return vec<n>([&](int i) { return a[i] + b; });
}
template <int n>
HORNER_HD Vec<n> operator*(Vec<n> a, float b) {
  return vec<n>([&](int i) { return a[i] * b; });
}
template <int n>
HORNER_HD Vec<n> operator*(float a, Vec<n> b) {
  return b * a;
}
HORNER_HD float min_nan(float a, float b) {  // propagates NaN
#ifdef __CUDA_ARCH__
  float y;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a > b ? b : a;
#endif
}
template <int n>
HORNER_HD Vec<n> min_nan(Vec<n> a, float b) {
  return vec<n>([&](int i) { return min_nan(a[i], b); });
}

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kNoLog2DecayLeft = float(kNoDecayLeft * 1.4426950408889634);

// 2^x in one instruction of the special function unit, to 2 ulps; 0 below 2^-126.
HORNER_HD float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}
HORNER_HD float exp_fast(float x) {
  return exp2_fast(x * kLog2e);
}

// tanh, for 16-bit problems in one instruction: its relative error of 2^-11 is below that of their
// products.
template <class T>
HORNER_HD float tanh_of(float x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 2) {
    float y;
    asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
  }
#endif
  return tanhf(x);
}

// Exponents in units of ln 2, so that exp is one instruction.
template <int n>
struct Base2Exponent {
  Vec<n> of;
};

}  // namespace horner::attn::kernels::cuda

namespace horner::attn {

template <int n>
struct Maths<kernels::cuda::Base2Exponent<n>> {
  static HORNER_HD kernels::cuda::Base2Exponent<n> exp(const kernels::cuda::Base2Exponent<n>& x) {
    return {kernels::cuda::vec<n>([&](int i) { return kernels::cuda::exp2_fast(x.of[i]); })};
  }
};

}  // namespace horner::attn

namespace horner::attn::kernels::cuda {

// Scores are multiplied by kUnit: units of ln 2 for exp, of 1 for other weights.
template <class W>
inline constexpr float kUnit = std::is_same_v<W, Exp> ? kLog2e : 1;

// From a product to scale x - sub in kUnit, where 16-bit problems have `sub` in kUnit. Exp in
// float32 rounds scale x like the definition. A shift is one of these scores: its weight is 1 in
// every kernel, and a row whose one key has all the weight has no error.
template <class T, class W>
__device__ __forceinline__ float shifted(float x, float scale, float sub) {
  if constexpr (sizeof(T) == 4 && std::is_same_v<W, Exp>)
    return (__fmul_rn(x, scale) - sub) * kLog2e;
  else
    return x * (scale * kUnit<W>)-sub;
}

template <int n>
HORNER_HD Slope<Vec<n>> slopes_of(const Exp& w, const Vec<n>& x) {
  const Vec<n> y = weight(w, Base2Exponent<n>{x}).w.of;
  return {y, y};
}
template <int n>
HORNER_HD Vec<n> weights_of(const Exp& w, const Vec<n>& x) {
  return slopes_of(w, x).w;
}
// A polynomial of compile-time degree; 0: any other, or slopes of a non-series.
template <int degree>
struct FixedDegree {
  const Polynomial& p;
};
template <class Weight>
inline constexpr bool kIsFixedDegree = false;
template <int degree>
inline constexpr bool kIsFixedDegree<FixedDegree<degree>> = degree != 0;
// A polynomial of at most this degree that is not a series (a power, or 1 + x): its slope needs a
// separate sum.
template <int degree>
struct MaxDegree {
  const Polynomial& p;
};
constexpr bool is_specialized_degree(int n) {
  return n == 1 || n == 2 || n == 3 || n == 4 || n == 6 || n == 8 || n == 10;
}
// Calls f(weight) with a polynomial of the given degree. Call it around loops, not inside.
template <class W, class F>
HORNER_HD void with_degree(const W& w, int, const F& f) {
  f(w);
}
template <class F>
HORNER_HD void with_degree(const Polynomial& p, int degree, const F& f) {
  switch (degree) {
      // clang-format off
    case 1:  // with c[2] = 0
    case 2: return f(FixedDegree<2>{p});
    case 3: return f(FixedDegree<3>{p});
    case 4: return f(FixedDegree<4>{p});
    case 6: return f(FixedDegree<6>{p});
    case 8: return f(FixedDegree<8>{p});
    case 10: return f(FixedDegree<10>{p});
    default: return f(FixedDegree<0>{p});
      // clang-format on
  }
}
// The same with one code path for every degree.
template <class W, class F>
HORNER_HD void with_any_degree(const W& w, const F& f) {
  f(w);
}
template <class F>
HORNER_HD void with_any_degree(const Polynomial& p, const F& f) {
  f(FixedDegree<0>{p});
}
// The degree for values, where odd ones from 5 on round up (the added c is 0), and the degree for
// slopes.
template <class W>
HORNER_HD int degree_of(const W&) {
  return 0;
}
HORNER_HD int degree_of(const Polynomial& p) {
  return p.degree > 4 && p.degree < 10 ? p.degree + p.degree % 2 : p.degree;
}
template <class W>
HORNER_HD int slope_degree_of(const W&) {
  return 0;
}
HORNER_HD int slope_degree_of(const Polynomial& p) {
  return p.is_series && p.degree > 1 ? p.degree : 0;
}
// Calls f(weight) with the weight whose slopes are specialized. Call it around loops.
template <class W, class F>
HORNER_HD void with_slopes(const W& w, const F& f) {
  f(w);
}
template <class F>
HORNER_HD void with_slopes(const Polynomial& p, const F& f) {
  if (slope_degree_of(p) == 0 && p.degree <= 2) return f(MaxDegree<2>{p});
  if (slope_degree_of(p) == 0 && p.degree <= 4) return f(MaxDegree<4>{p});
  with_degree(p, slope_degree_of(p), f);
}

// Eight elements at a time keep a warp busy; more would take registers.
template <int degree, int n>
HORNER_HD Vec<n> weights_of(const FixedDegree<degree>& w, const Vec<n>& x) {
  constexpr int k = n < 8 ? n : 8;
  Vec<n> y;
#pragma unroll
  for (int i = 0; i < n; i += k) {
    const auto part = vec<k>([&](int j) { return x[i + j]; });
    Vec<k> of_part;
    if constexpr (degree == 0) {
      of_part = weight(w.p, part).w;
    } else {
      of_part = weight_of_degree<degree>(w.p, part).w;
    }
#pragma unroll
    for (int j = 0; j < k; ++j) y[i + j] = of_part[j];
  }
  return y;
}
template <int degree, int n>
HORNER_HD Slope<Vec<n>> slopes_of(const FixedDegree<degree>& w, const Vec<n>& x) {
  if constexpr (degree == 0) {
    return weight(w.p, x);
  } else {
    return series_of_degree<degree>(w.p, x);
  }
}

template <int degree, int n>
HORNER_HD Slope<Vec<n>> slopes_of(const MaxDegree<degree>& w, const Vec<n>& x) {
  return weight_of_degree<degree>(w.p, x);
}

// The weight of one score and its Jacobian, diag(slope) - column row^T; all 0 for a score of -inf.
struct WeightJacobian {
  float w, slope, column, row;
};

HORNER_HD float root(float z, float a) {  // z^(1 / a)
  return a == 1 ? z : a == 0.5f ? z * z : exp2_fast(log2f(z) / a);
}
HORNER_HD float range(const RowThreshold& r) {
  return fmaxf(r.top, 0) - r.threshold + 1e-10f;
}
// Whether a score is the row's min or max, up to the error of computing it in two ways.
HORNER_HD bool is_near(float x, float y, const RowThreshold& r) {
  return fabsf(x - y) <= 1e-6f * range(r);
}

HORNER_HD WeightJacobian weight_jacobian(const RuntimeWeight& w, float x, const RowThreshold& r) {
  if (w.kind == RuntimeWeight::sigmoid) {
    const Slope<float> y = weight(Sigmoid{}, x);
    return {y.w, y.dw, 0, 0};
  }
  if (r.top != r.top) return {r.top, r.top, r.top, r.top};
  if (w.kind == RuntimeWeight::softpick) {  // times e^-top, before the maximum with 0
    const float e = expf(x - r.top), one = expf(-r.top);
    return {x < 1 ? one * expm1f(x) : e - one, e, 0, 0};
  }
  if (w.kind == RuntimeWeight::entmax) {
    const float a = w.alpha - 1, z = fmaxf((x - r.top) * a - r.threshold, 0), p = root(z, a);
    const float slope = z > 0 ? p / z : 0;  // p^(2 - alpha)
    return {p, slope, slope, slope};        // times the mean of dw
  }
  const float p = exp_fast(x - r.top) * r.inv_sum;
  if (w.kind == RuntimeWeight::top_k) {
    const float kept = x >= r.threshold ? p : 0;
    return {kept, kept, w.renormalise ? kept : p, kept};
  }
  const float y = x > -INFINITY ? (x - r.threshold) / range(r) * p : 0;
  return {y, y, p, y};
}

// Softpick: of y = e^x - 1, N sums what is above 0 and W sums |y|.
HORNER_HD float in_numerator(const RuntimeWeight& w, float y) {
  return w.kind == RuntimeWeight::softpick ? fmaxf(y, 0) : y;
}
// The gradient of a weight, or of y, from those through N and W.
HORNER_HD float d_weight(const RuntimeWeight& w, float y, float dp, float dW) {
  if (w.kind != RuntimeWeight::softpick) return dp + dW;
  return y < 0 ? -dW : y > 0 ? dp + dW : dp;
}

// The score gradient from the weight's gradient.
HORNER_HD float d_score(const RuntimeWeight& w, float x, const RowThreshold& r,
                        const RowGradientSums& s, const WeightJacobian& p, float dw) {
  if (w.kind == RuntimeWeight::entmax) return p.slope * (dw - s.dot - s.rest);
  float dx = p.slope * dw - p.column * s.dot;
  if (w.kind == RuntimeWeight::self_adjusted) {
    dx += p.column * dw / range(r);
    if (is_near(x, r.threshold, r)) dx += s.at_min / range(r);
    if (is_near(x, fmaxf(r.top, 0), r)) dx += s.at_max / range(r);
  }
  return dx;
}

// What a tile of scores needs: nothing, a clamp, or everything, such as a mask or decay.
enum class Path { plain, clamp, general };

// Scores of keys and queries in backward: z is x minus the row's shift, in kUnit.
template <int n>
struct Scores {
  Vec<n> z, limit;   // the weight is w(min(z, limit))
  Vec<n> dp, a, dW;  // the weight's gradient is a dp + dW
  uint32_t seen;     // one bit per score
};
template <int n>
struct ScoreGradients {
  Vec<n> w, dx;
};

// `row(i)` is the [B, H, T] row index of element i.
template <Path path, int n, class W, class Row>
HORNER_HD ScoreGradients<n> score_gradients(const W& w, const Fused&, const Scores<n>& x,
                                            const Row&) {
  Vec<n> z = x.z;
  if constexpr (path != Path::plain) z = vec<n>([&](int i) { return min_nan(z[i], x.limit[i]); });
  const Slope<Vec<n>> slope = slopes_of(w, z);
  ScoreGradients<n> y{slope.w,
                      vec<n>([&](int i) { return slope.dw[i] * (x.a[i] * x.dp[i] + x.dW[i]); })};
  if constexpr (path != Path::plain)
    y.dx = vec<n>([&](int i) { return x.z[i] < x.limit[i] ? y.dx[i] : 0; });
  if constexpr (path == Path::general)
    y = {vec<n>([&](int i) { return x.seen >> i & 1 ? y.w[i] : 0; }),
         vec<n>([&](int i) { return x.seen >> i & 1 ? y.dx[i] : 0; })};
  return y;
}
template <Path path, int n, class Row>
HORNER_HD ScoreGradients<n> score_gradients(const RuntimeWeight& w, const Fused& f,
                                            const Scores<n>& x, const Row& row) {
  ScoreGradients<n> y;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int64_t at = row(i);
    const RowThreshold threshold = f.thresholds ? f.thresholds[at] : RowThreshold{};
    const RowGradientSums sums = f.gradient_sums ? f.gradient_sums[at] : RowGradientSums{};
    const bool seen = path != Path::general || x.seen >> i & 1;
    const float score = min_nan(x.z[i], x.limit[i]);
    const WeightJacobian p = weight_jacobian(w, score, threshold);
    const float dw = d_weight(w, p.w, x.a[i] * x.dp[i], x.dW[i]);
    const float dx = d_score(w, score, threshold, sums, p, dw);
    y.w[i] = seen ? in_numerator(w, p.w) : 0;
    y.dx[i] = seen && x.z[i] < x.limit[i] ? dx : 0;
  }
  return y;
}

}  // namespace horner::attn::kernels::cuda

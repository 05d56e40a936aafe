// Decay on Hopper. With c the running sums of the log gates, in double, a weight is multiplied by
//   exp(c_t - c_s) = 2^(row + key),   row = log2(e) (c_t - c_ref),   key = log2(e) (c_ref - c_s)
// Usually this is a query factor times a key factor. Where gates decay so fast that a factor would
// overflow a float, the exponents are added first ("log space"): their sum is small where t sees s.
// Gates may be above 1; their product over any tokens must be below 2^80.
#pragma once

#include "attn/kernels/cuda/common/tiles.cuh"
#include "attn/kernels/cuda/hopper/hopper.h"

namespace horner::attn::kernels::cuda {

// A weight with decay, with separate kernels. The denominator is the row's sum only for exp, whose
// scores have the log of the decay added (kDecayInScores).
template <class W>
struct WithDecay {
  W of;
  const float* factors;  // forward (hopper_decay_factors)
};
template <class W>
inline constexpr bool kHasDecay = false;
template <class W>
inline constexpr bool kHasDecay<WithDecay<W>> = true;

template <class W>
HORNER_HD const W& base_weight(const W& w) {
  return w;
}
template <class W>
HORNER_HD const W& base_weight(const WithDecay<W>& w) {
  return w.of;
}
template <class W>
using BaseWeight = std::remove_cvref_t<decltype(base_weight(std::declval<W>()))>;
template <class W>
inline constexpr bool kIsExp = std::is_same_v<BaseWeight<W>, Exp>;
template <class W>
inline constexpr bool kDecayInScores = kHasDecay<W> && kIsExp<W>;

// c[0] + c[1] x, of unscaled products.
struct Linear {
  const Polynomial& p;
};
template <>
inline constexpr bool kIsFixedDegree<Linear> = true;
template <int n>
HORNER_HD Vec<n> weights_of(const Linear& w, const Vec<n>& x) {
  return x * w.p.c[1] + w.p.c[0];
}

// exp of bounded scores (is_clamped_exp), without a shift.
struct ClampedExp {};
template <class W>
inline constexpr bool kExponential = std::is_same_v<W, Exp> || std::is_same_v<W, ClampedExp>;

// With decay, only polynomials of degree 1 and 2 are specialized.
HORNER_HD int degree_of(const WithDecay<Polynomial>& w) {
  return w.of.degree <= 2 ? w.of.degree : 0;
}
HORNER_HD int slope_degree_of(const WithDecay<Polynomial>& w) {
  return w.of.degree == 1 || (w.of.degree == 2 && w.of.is_series) ? w.of.degree : 0;
}
template <class W, class F>
  requires(kExponential<W>)
HORNER_HD void with_degree(const WithDecay<W>& w, int, const F& f) {
  f(w.of);
}
template <class F>
HORNER_HD void with_degree(const WithDecay<Polynomial>& w, int degree, const F& f) {
  if (degree == 1) return f(Linear{w.of});
  if (degree == 2) return f(FixedDegree<2>{w.of});
  f(FixedDegree<0>{w.of});
}

__device__ inline const float* tile_factors(const Fused& f, const float* factors, const Head& head,
                                            int s0) {
  const int64_t tile = int64_t(head.b * f.G + head.g) * factor_tiles(f) + s0 / kFactorTile;
  return factors + tile * kFactorRow;
}
// c_t - c_s in units of ln 2.
__device__ inline float log2_decay_rn(double query, double key) {
  return __fmul_rn(float(query - key), kLog2e);  // not fused into each sum that uses it
}
inline constexpr float kMaxLog2Factor = 80;  // largest exponent of a factor

// Whether no decay is left from key s, or any before it, to query t, or any after it: between these
// tokens and those, products of gates may rise by as much as is allowed.
__device__ inline bool is_decayed(const Fused& f, const Head& head, int t, int s) {
  constexpr double kRise = 2 * kMaxLog2Factor / kLog2e;
  return gates_at_query(f, head, t) - gates_at_key(f, head, s) < kNoDecayLeft - kRise;
}
// How many of n tiles remain, given that a tile at which `ends` is true ends them. By a whole warp.
template <class F>
__device__ inline int tiles_before(int n, const F& ends) {
  int first = 0;  // tiles before it remain, tiles from n on do not
  while (first < n) {
    const int step = (n - first + 31) / 32, i = first + lane() * step;
    const uint32_t found = __ballot_sync(~0u, i >= n || ends(i));
    const int before = found ? __ffs(int(found)) - 1 : 32;  // tiles at which it is false
    n = min(n, first + before * step);
    first = before > 0 ? first + (before - 1) * step + 1 : n;
  }
  return n;
}

// Forward: the reference is the warpgroup's first query. The remaining factor of each query
// multiplies its sums, at the end or before the first log-space tile. A key's factor is the one in
// shared memory, relative to the last of its kFactorTile keys, times `by`.
template <int tiles>
struct TileFactors {
  float by[tiles];
};
struct NoDecay {
  static constexpr bool kEnabled = false, kInScores = false;
};
// Decay of a tile of keys, in shared memory, and of a thread's two rows.
template <int tiles>
struct TileDecay {
  static constexpr bool kEnabled = true, kInScores = false;
  uint32_t keys;
  TileFactors<tiles> of;
  bool log_space;
  float row[2];
  double here;

  __device__ float2 of_keys(int column, int first) const { return of_keys(keys, column, first); }
  // The thread's two of eight keys, in the array at offset `first`.
  static __device__ float2 of_keys(uint32_t keys, int column, int first) {
    constexpr int kColumns = kFactorTile / 8;
    const int at = column / kColumns * kFactorRow + first + column % kColumns * 8;
    float2 y;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n"
                 : "=f"(y.x), "=f"(y.y)
                 : "r"(keys + uint32_t(at * 4 + lane() % 4 * 8))
                 : "memory");
    return y;
  }
  static __device__ float from(double here, uint32_t keys, int tile) {
    double key;
    asm volatile("ld.shared.f64 %0, [%1];\n"
                 : "=d"(key)
                 : "r"(keys + uint32_t((tile * kFactorRow + 3 * kFactorTile) * 4))
                 : "memory");
    return log2_decay_rn(here, key);
  }
  // Multiplies by the factors, or in log space by the gates alone.
  template <int columns>
  __device__ __forceinline__ void multiply(float (&x)[columns][4]) const {
    const int first = log_space ? 2 * kFactorTile : 0;
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      const float2 key = of_keys(j, first);
      const float by = of.by[j / (kFactorTile / 8)];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float y = (i ? key.y : key.x) * by;
        x[j][i] *= y, x[j][i + 2] *= y;
      }
    }
  }
  // Calls f(x, exponent) for each element.
  template <int columns, class F>
  __device__ __forceinline__ void each(float (&x)[columns][4], const F& f) const {
    float by[2];
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      const float2 key = of_keys(j, kFactorTile);
      if (j % (kFactorTile / 8) == 0) {
        const float y = from(here, keys, j / (kFactorTile / 8));
        by[0] = row[0] + y, by[1] = row[1] + y;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        f(x[j][i], fminf(by[i / 2] + (i % 2 ? key.y : key.x), kMaxLog2Factor));
    }
  }
};
// The same where logs of the decay are added to the scores: `row` is relative to the tile's keys.
struct TileLogDecay {
  static constexpr bool kEnabled = true, kInScores = true;
  uint32_t keys;
  float row[2];

  __device__ float2 of_keys(int column) const {
    return TileDecay<1>::of_keys(keys, column, kFactorTile);
  }
  // From products to scores less `row`, in units of ln 2; -inf where no decay is left.
  template <int columns>
  __device__ __forceinline__ void add(float (&x)[columns][4], float scale) const {
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      const float2 key = of_keys(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = x[j][i] * scale + (i % 2 ? key.y : key.x);
    }
    float first;  // the least of gates up to 1
    asm volatile("ld.shared.f32 %0, [%1];\n"
                 : "=f"(first)
                 : "r"(keys + kFactorTile * 4)
                 : "memory");
    if (fminf(row[0], row[1]) + first >= kNoLog2DecayLeft) return;
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      const float2 key = of_keys(j);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (row[i / 2] + (i % 2 ? key.y : key.x) < kNoLog2DecayLeft) x[j][i] = -INFINITY;
    }
  }
};
enum class DecayKind { none, factors, in_scores };
template <class W>
inline constexpr DecayKind kDecayKind = kDecayInScores<W> ? DecayKind::in_scores
                                        : kHasDecay<W>    ? DecayKind::factors
                                                          : DecayKind::none;
// Decay of a thread's rows, `first` and 8 further, of the warpgroup's 64 from t0 on.
template <class T, int keys, DecayKind>
struct RowDecay {
  __device__ RowDecay(const Fused&, const Head&, int, int) {}
  __device__ int log_space_from(const Fused&, const Head&, int, int, int own) const { return own; }
  __device__ int of_tile(uint32_t, bool) const { return 0; }
  __device__ NoDecay decay(uint32_t, int, bool) const { return {}; }
};
template <class T, int keys>
struct RowDecay<T, keys, DecayKind::in_scores> {
  float row[2];  // in units of ln 2
  double here;   // c_t0

  __device__ RowDecay(const Fused& f, const Head& head, int t0, int first) : row{} {
    here = f.S > 0 ? gates_at_query(f, head, t0) : 0;
    for (int i = 0; i < 2 && f.S > 0; ++i)
      row[i] = log2_decay_rn(gates_at_query(f, head, first + 8 * i), here);
  }
  __device__ int log_space_from(const Fused&, const Head&, int, int, int own) const { return own; }
  __device__ float of_tile(uint32_t at, bool) const { return TileDecay<1>::from(here, at, 0); }
  __device__ TileLogDecay decay(uint32_t at, float tile, bool) const {
    return {at, {row[0] + tile, row[1] + tile}};
  }
};
template <class T, int keys>
struct RowDecay<T, keys, DecayKind::factors> {
  static constexpr int kTiles = keys / kFactorTile;
  // float16 has no range for weights that the rows' own factors would shrink again.
  static constexpr float kMaxLog2 = std::is_same_v<T, fp16> ? 0 : kMaxLog2Factor;
  using Factors = TileFactors<kTiles>;
  using Decay = TileDecay<kTiles>;
  float row[2];  // in units of ln 2
  double here;   // c_t0

  __device__ RowDecay(const Fused& f, const Head& head, int t0, int first) : row{} {
    here = f.S > 0 ? gates_at_query(f, head, t0) : 0;
    for (int i = 0; i < 2 && f.S > 0; ++i)
      row[i] = log2_decay_rn(gates_at_query(f, head, first + 8 * i), here);
  }
  // The first of the `own` tiles of keys from `begin` on whose factors would be too large, or
  // `own`. Of gates up to 1, factors grow with the key and exceed 1 only after the warpgroup's
  // first query.
  __device__ int log_space_from(const Fused& f, const Head& head, int t0, int begin,
                                int own) const {
    const int at = t0 + f.S - f.T;
    for (int s = max(at, begin) / kFactorTile * kFactorTile; own > 0 && s < at + 64;
         s += kFactorTile)
      if (log2_decay_rn(here, gates_at_key(f, head, s + kFactorTile - 1)) > kMaxLog2)
        return min((s - begin) / keys, own);
    return own;
  }
  // Factors of the tile at a shared address.
  __device__ Factors of_tile(uint32_t factors, bool log_space) const {
    Factors y;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      y.by[i] = log_space ? 1 : exp2_fast(fminf(Decay::from(here, factors, i), kMaxLog2Factor));
    return y;
  }
  __device__ Decay decay(uint32_t at, const Factors& of, bool log_space) const {
    return {at, of, log_space, {row[0], row[1]}, here};
  }
};

// Whether query t sees any key.
__device__ inline bool sees_any(const Seen& seen, int b, int t) {
  const int lo = seen.lo(t);
  int s = seen.hi(t) - 1;
  while (seen.keep && s >= lo && !seen.keep[int64_t(b) * seen.S + s]) --s;
  return s >= lo;
}

// Backward: the reference is key 63 of the block's 128.
__device__ inline double gates_at_reference(const Fused& f, const Head& head, int s0) {
  return gates_at_key(f, head, s0 + 63);
}
// Polynomials: whether factors would leave the range of a float.
template <class W>
__device__ inline bool needs_log_space(const Fused& f, const Head& head, int s0) {
  if constexpr (!kHasDecay<W> || kIsExp<W>) return false;
  const double here = gates_at_reference(f, head, s0);
  return log2_decay_rn(gates_at_key(f, head, s0), here) > kMaxLog2Factor ||
         log2_decay_rn(here, gates_at_key(f, head, s0 + 127)) > kMaxLog2Factor;
}
// A polynomial in log space; `scale` brings scores to its unit, `per_scale` its slopes back.
template <bool linear>
struct LogSpace {
  const Polynomial& p;
  float scale, per_scale;
};
// Decay of a thread's keys, `first` and 8 further, backward.
template <bool has_decay>
struct KeyDecay {
  __device__ KeyDecay(const Fused&, const Head&, int, int) {}
};
template <>
struct KeyDecay<true> {
  float of[2];     // in units of ln 2, or factors
  float slope[2];  // Linear only; includes the input gate

  __device__ KeyDecay(const Fused& f, const Head& head, int s0, int first) {
    const double from = gates_at_reference(f, head, s0);
#pragma unroll
    for (int i = 0; i < 2; ++i) of[i] = log2_decay_rn(from, gates_at_key(f, head, first + 8 * i));
  }
  template <class Weight>
  __device__ void set(const Weight&, const float (&)[2], float) {
    of[0] = exp2_fast(of[0]), of[1] = exp2_fast(of[1]);
  }
  __device__ void set(const Exp&, const float (&)[2], float) {}
  template <bool linear>
  __device__ void set(const LogSpace<linear>&, const float (&)[2], float) {}
  __device__ void set(const Linear& w, const float (&gates)[2], float scale) {
    of[0] = exp2_fast(of[0]), of[1] = exp2_fast(of[1]);
    for (int i = 0; i < 2; ++i) slope[i] = of[i] * gates[i] * (w.p.c[1] / scale);
  }
};
// c_t - c_ref of a lane's two queries, backward.
template <bool has_decay>
struct QueryDecay {
  __device__ void load(const Fused&, const Head&, int, int) {}
  __device__ float row(int, double) const { return 0; }
};
template <>
struct QueryDecay<true> {
  double c[2];

  __device__ void load(const Fused& f, const Head& head, int i, int t) {
    c[i] = gates_at_query(f, head, t);
  }
  __device__ float row(int i, double from) const { return log2_decay_rn(c[i], from); }
};

}  // namespace horner::attn::kernels::cuda

// From scores to weights and score gradients in the backward on Hopper, in fragment order: element
// i of column j belongs to key `key` + 8 (i / 2) and to query 8 j + 2 (lane % 4) + i % 2 of a tile.
//   w a -> weights,   dx = w' (a dp + dW) -> slopes,   both rounded, as A operands
#pragma once

#include "attn/kernels/cuda/hopper/tiles.cuh"

namespace horner::attn::kernels::cuda {

template <class F>
__device__ __forceinline__ void with_slopes(const WithDecay<Exp>& w, const F& f) {
  f(w.of);
}
template <class F>
__device__ __forceinline__ void with_slopes(const WithDecay<Polynomial>& w, const F& f) {
  if (w.of.degree == 1) return f(Linear{w.of});
  if (w.of.degree == 2 && w.of.is_series) return f(FixedDegree<2>{w.of});
  if (w.of.degree <= 2) return f(MaxDegree<2>{w.of});
  f(FixedDegree<0>{w.of});
}

template <class W, class F>
__device__ __forceinline__ void with_slopes(const WithCentre<W>& w, const F& f) {
  with_slopes(w.of, f);
}
template <class W, class F>
__device__ __forceinline__ void with_slopes(const WithCap<W>& w, const F& f) {
  f(w);
}

// Subtracts the centres from products, in place.
__device__ __forceinline__ void subtract_centres(const QueryColumns& of, float (&x)[8][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 centre = *reinterpret_cast<const float2*>(of.centre + 8 * j + lane() % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[j][i] -= i % 2 ? centre.y : centre.x;
  }
}

// The intervals of keys that query n and the next see, relative to the block.
template <class W>
__device__ __forceinline__ short4 seen_by_two(const QueryColumns& of, const uchar2* seen8, int n) {
  if constexpr (kHasCentre<W>) {
    const uchar4 seen = *reinterpret_cast<const uchar4*>(seen8 + n);
    return {seen.x, seen.y, seen.z, seen.w};
  } else {
    return *reinterpret_cast<const short4*>(of.seen + n);
  }
}

struct MaskBits {
  bool some;            // some scores of this warp are hidden or clamped
  uint32_t seen, live;  // one bit per score; live: its gradient passes
};

template <class W>
__device__ __forceinline__ MaskBits mask(const Fused& f, const QueryColumns& of,
                                         const uchar2* seen8, uint32_t flags, int b, int key,
                                         float (&x)[8][4]) {
  MaskBits m{false, ~0u, ~0u};
  if (flags & QueryColumns::kMasked) {
    m.some = true, m.seen = 0;
    const int row = warp() * 16 + lane() / 4;  // in the block
    const bool kept[2] = {!f.seen.keep || f.seen.keep[int64_t(b) * f.S + min(key, f.S - 1)],
                          !f.seen.keep || f.seen.keep[int64_t(b) * f.S + min(key + 8, f.S - 1)]};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const short4 seen = seen_by_two<W>(of, seen8, 8 * j + lane() % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = row + i / 2 * 8, lo = i % 2 ? seen.z : seen.x, hi = i % 2 ? seen.w : seen.y;
        const bool sees = s >= lo && s < hi && kept[i / 2];
        m.seen |= uint32_t(sees) << (4 * j + i);
      }
    }
    m.live = m.seen;
  }
  if (flags & QueryColumns::kClamped) {
    const float most = f.clamp / f.scale;
    bool above = true;
    if constexpr (kIsExp<W>) {
      float top[4] = {x[0][0], x[0][1], x[0][2], x[0][3]};
#pragma unroll
      for (int j = 4; j < 32; ++j) top[j % 4] = fmaxf(top[j % 4], x[j / 4][j % 4]);
      above = __any_sync(~0u, fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])) >= most);
    }
    if (above) {  // rarely
      m.some = true;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        float& y = x[j / 4][j % 4];
        if (y >= most) m.live &= ~(1u << j);
        y = min_nan(y, most);
      }
    }
  }
  return m;
}

// Zeroes the rounded weights of unseen scores, so that the arithmetic before it has no branch.
__device__ __forceinline__ void hide(uint32_t seen, uint32_t (&weights)[4][4]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint32_t two = seen >> 2 * j & 3;
    weights[j / 4][j % 4] &= (two & 1 ? 0xffff : 0) | (two & 2 ? 0xffff0000 : 0);
  }
}
// Negates weights and slopes where a is negative.
__device__ __forceinline__ void negate(const QueryColumns& of, float (&x)[8][4],
                                       uint32_t (&weights)[4][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint32_t signs = of.negative[j / 4] >> (8 * j % 32 + lane() % 4 * 2);
    const uint32_t flips = (signs & 1 ? 0x8000u : 0) | (signs & 2 ? 0x80000000u : 0);
    weights[j / 2][j % 2 * 2] ^= flips, weights[j / 2][j % 2 * 2 + 1] ^= flips;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (signs >> i % 2 & 1) x[j][i] = -x[j][i];
  }
}
// From products to weights times a, rounded; x becomes the slopes (Exp: weights times a).
template <class T, int, bool has_decay>
__device__ __forceinline__ void to_weights(const Fused& f, const Exp&, const QueryColumns& of,
                                           uint32_t flags, const MaskBits& bits,
                                           const KeyDecay<has_decay>& decay, float (&x)[8][4],
                                           uint32_t (&weights)[4][4]) {
  const float scale = f.scale * kLog2e;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 sub = *reinterpret_cast<const float2*>(of.first + 8 * j + lane() % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float y = x[j][i] * scale - (i % 2 ? sub.y : sub.x);
      if constexpr (has_decay) y += decay.of[i / 2];
      x[j][i] = exp2_fast(y);
    }
  }
  if (flags & QueryColumns::kNegative) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 8 * j % 32 + lane() % 4 * 2 + i % 2;
        if (of.negative[j / 4] >> n & 1) x[j][i] = -x[j][i];
      }
  }
  rounded<T>(weights, x);
  if (flags & QueryColumns::kMasked) hide(bits.seen, weights);
}
// The same of capped scores: x is tanh, and becomes the weights times a and the slope of the cap.
template <class T, int>
__device__ __forceinline__ void to_weights(const Fused& f, const WithCap<Exp>&,
                                           const QueryColumns& of, uint32_t flags,
                                           const MaskBits& bits, const KeyDecay<false>&,
                                           float (&x)[8][4], uint32_t (&weights)[4][4]) {
  const float scale = f.scale * kLog2e;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 sub = *reinterpret_cast<const float2*>(of.first + 8 * j + lane() % 4 * 2);
    const auto y =
        vec<4>([&](int i) { return exp2_fast(x[j][i] * scale - (i % 2 ? sub.y : sub.x)); });
    uint32_t* const to = weights[j / 2] + j % 2 * 2;
    to[0] = pack2(T(), y[0], y[1]), to[1] = pack2(T(), y[2], y[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[j][i] = y[i] * (1 - x[j][i] * x[j][i]);
  }
  if (flags & QueryColumns::kNegative) negate(of, x, weights);
  if (flags & QueryColumns::kMasked) hide(bits.seen, weights);
}
// Weights and slopes of a polynomial, for the n / 4 columns from j on.
template <int n, class Weight>
__device__ __forceinline__ Slope<Vec<n>> slopes_at(const Fused& f, const Weight& w,
                                                   const float (&x)[8][4], int j) {
  return slopes_of(w, vec<n>([&](int i) {
                     return kIsFixedDegree<Weight> ? x[j + i / 4][i % 4]
                                                   : x[j + i / 4][i % 4] * f.scale;
                   }));
}
// The same for a polynomial with decay, times a and the decay.
template <class T, int batch, class Weight>
  requires(!std::is_same_v<Weight, Exp>)
__device__ __forceinline__ void to_weights(const Fused& f, const Weight& w, const QueryColumns& of,
                                           uint32_t flags, const MaskBits& bits,
                                           const KeyDecay<true>& decay, float (&x)[8][4],
                                           uint32_t (&weights)[4][4]) {
  constexpr int n = 4 * batch;
#pragma unroll
  for (int j = 0; j < 8; j += batch) {
    const Slope<Vec<n>> y = slopes_at<n>(f, w, x, j);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const float2 a = *reinterpret_cast<const float2*>(of.first + 8 * (j + i) + lane() % 4 * 2);
      const auto by = vec<4>([&](int c) { return (c % 2 ? a.y : a.x) * decay.of[c / 2]; });
      uint32_t* const to = weights[(j + i) / 2] + (j + i) % 2 * 2;
      to[0] = pack2(T(), y.w[4 * i] * by[0], y.w[4 * i + 1] * by[1]);
      to[1] = pack2(T(), y.w[4 * i + 2] * by[2], y.w[4 * i + 3] * by[3]);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[j + i][c] = y.dw[4 * i + c] * by[c];
    }
  }
  if (flags & QueryColumns::kMasked) hide(bits.seen, weights);
}
template <class T, int>
__device__ __forceinline__ void to_weights(const Fused&, const Linear& w, const QueryColumns& of,
                                           uint32_t flags, const MaskBits& bits,
                                           const KeyDecay<true>& decay, float (&x)[8][4],
                                           uint32_t (&weights)[4][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 a = *reinterpret_cast<const float2*>(of.first + 8 * j + lane() % 4 * 2);
    const auto y = vec<4>([&](int c) {
      return (x[j][c] * w.p.c[1] + w.p.c[0]) * ((c % 2 ? a.y : a.x) * decay.of[c / 2]);
    });
    uint32_t* const to = weights[j / 2] + j % 2 * 2;
    to[0] = pack2(T(), y[0], y[1]), to[1] = pack2(T(), y[2], y[3]);
#pragma unroll
    for (int c = 0; c < 4; ++c) x[j][c] = (c % 2 ? a.y : a.x) * decay.slope[c / 2];
  }
  if (flags & QueryColumns::kMasked) hide(bits.seen, weights);
}
template <class T, int batch, bool linear>
__device__ __forceinline__ void to_weights(const Fused&, const LogSpace<linear>& w,
                                           const QueryColumns& of, uint32_t flags,
                                           const MaskBits& bits, const KeyDecay<true>& decay,
                                           float (&x)[8][4], uint32_t (&weights)[4][4]) {
  constexpr int n = 4 * batch;
#pragma unroll
  for (int j = 0; j < 8; j += batch) {
    const auto z = vec<n>([&](int i) { return x[j + i / 4][i % 4] * w.scale; });
    Slope<Vec<n>> y;
    if constexpr (linear) {
      y = {z * w.p.c[1] + w.p.c[0], vec<n>([&](int) { return w.p.c[1]; })};
    } else {
      y = weight(w.p, z);
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const float2 sub = *reinterpret_cast<const float2*>(of.first + 8 * (j + i) + lane() % 4 * 2);
      const auto a =
          vec<4>([&](int c) { return exp2_fast(decay.of[c / 2] - (c % 2 ? sub.y : sub.x)); });
      uint32_t* const to = weights[(j + i) / 2] + (j + i) % 2 * 2;
      to[0] = pack2(T(), y.w[4 * i] * a[0], y.w[4 * i + 1] * a[1]);
      to[1] = pack2(T(), y.w[4 * i + 2] * a[2], y.w[4 * i + 3] * a[3]);
#pragma unroll
      for (int c = 0; c < 4; ++c) x[j + i][c] = y.dw[4 * i + c] * w.per_scale * a[c];
    }
  }
  if (flags & QueryColumns::kNegative) negate(of, x, weights);
  if (flags & QueryColumns::kMasked) hide(bits.seen, weights);
}
template <class T, int batch, class Weight>
  requires(!std::is_same_v<Weight, Exp>)
__device__ __forceinline__ void to_weights(const Fused& f, const Weight& w, const QueryColumns& of,
                                           uint32_t flags, const MaskBits& bits,
                                           const KeyDecay<false>&, float (&x)[8][4],
                                           uint32_t (&weights)[4][4]) {
  constexpr int n = 4 * batch;
#pragma unroll
  for (int j = 0; j < 8; j += batch) {
    const Slope<Vec<n>> y = slopes_at<n>(f, w, x, j);
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const float2 a = *reinterpret_cast<const float2*>(of.first + 8 * (j + i) + lane() % 4 * 2);
      uint32_t* const to = weights[(j + i) / 2] + (j + i) % 2 * 2;
      to[0] = pack2(T(), y.w[4 * i] * a.x, y.w[4 * i + 1] * a.y);
      to[1] = pack2(T(), y.w[4 * i + 2] * a.x, y.w[4 * i + 3] * a.y);
    }
#pragma unroll
    for (int i = 0; i < n; ++i) x[j + i / 4][i % 4] = y.dw[i];
  }
  if (flags & QueryColumns::kMasked) hide(bits.seen, weights);
}
// Adds `some` of the score gradients to those of the decay: to their queries' part, and to `keys`.
__device__ __forceinline__ void add_decay_gradients(const Fused& f, const Head& head, int t0,
                                                    uint32_t some, const float (&dx)[8][4],
                                                    float (&keys)[2]) {
  float sum[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ColumnSums sums;
#pragma unroll
    for (int j = 4 * half; j < 4 * half + 4; ++j) {
      const auto y = vec<4>([&](int i) { return some >> (4 * j + i) & 1 ? dx[j][i] : 0; });
      sums.add(j % 4, y[0] + y[2], y[1] + y[3]);
      sum[0] += y[0] + y[1], sum[1] += y[2] + y[3];
    }
    const int t = t0 + 32 * half + ColumnSums::column();
    const float total = sums.total();
    if (t < f.T) atomicAdd(static_cast<float*>(f.d_decay_query) + head.row(f, t), total);
  }
  keys[0] += sum[0], keys[1] += sum[1];
}

// From slopes and the products dp of values and gradients to score gradients, rounded. The gradient
// of a decay in the scores sums them as they are, so that what cancels does, and those that a clamp
// takes from them: `keys` is the keys' part of these.
template <class T, class W>
__device__ __forceinline__ void hopper_score_gradients(const Fused& f, const Head& head, int t0,
                                                       const QueryColumns& of, const MaskBits& bits,
                                                       const float (&x)[8][4], float (&dp)[8][4],
                                                       uint32_t (&slopes)[4][4], float (&keys)[2]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if constexpr (kHasDecay<W> && !kIsExp<W>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dp[j][i] *= x[j][i];
      continue;
    }
    const float2 d = *reinterpret_cast<const float2*>(of.second + 8 * j + lane() % 4 * 2);
    float2 a{1, 1};
    if (!kIsExp<W>) a = *reinterpret_cast<const float2*>(of.first + 8 * j + lane() % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      dp[j][i] = x[j][i] * ((i % 2 ? a.y : a.x) * dp[j][i] + (i % 2 ? d.y : d.x));
  }
  if constexpr (kDecayInScores<W>)
    if (f.d_decay_key && bits.some && __any_sync(~0u, bits.seen & ~bits.live))
      add_decay_gradients(f, head, t0, bits.seen & ~bits.live, dp, keys);
  if (bits.some) {
#pragma unroll
    for (int j = 0; j < 32; ++j)
      if (!(bits.live >> j & 1)) dp[j / 4][j % 4] = 0;
  }
  rounded<T>(slopes, dp);
}

// Adds the weights times their gradients to their queries' part of the decay's gradient. The keys'
// part is v . dv (store_gates), so both take the rounded weights. `gated`: dp lacks the input
// gates.
template <class T, bool gated>
__device__ __forceinline__ void add_decay_rows(const Fused& f, const Head& head, int t0,
                                               const uint32_t (&weights)[4][4],
                                               const float (&dp)[8][4], const float (&gates)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ColumnSums sums;
#pragma unroll
    for (int j = 4 * half; j < 4 * half + 4; ++j) {
      const float2 w[2] = {unpack2(T(), weights[j / 2][j % 2 * 2]),
                           unpack2(T(), weights[j / 2][j % 2 * 2 + 1])};
      const auto by = [&](int i) { return gated ? gates[i] : 1; };
      sums.add(j % 4, w[0].x * dp[j][0] * by(0) + w[1].x * dp[j][2] * by(1),
               w[0].y * dp[j][1] * by(0) + w[1].y * dp[j][3] * by(1));
    }
    const int t = t0 + 32 * half + ColumnSums::column();
    const float sum = sums.total();
    if (t < f.T) atomicAdd(static_cast<float*>(f.d_decay_query) + head.row(f, t), sum);
  }
}

// Gates of a thread's keys, `key` and 8 further, which multiply rows: held in registers or loaded
// at use.
template <bool held>
struct KeyGates {
  __device__ KeyGates(const Fused&, const Head&, int) {}
  template <int columns>
  __device__ __forceinline__ void multiply(const Fused& f, const Head& head, int key,
                                           float (&x)[columns][4]) const {
    const float y[2] = {gate_of_key(f, head, key), gate_of_key(f, head, key + 8)};
#pragma unroll
    for (int j = 0; j < 4 * columns; ++j) x[j / 4][j % 4] *= y[j % 4 / 2];
  }
};
template <>
struct KeyGates<true> {
  float of[2] = {1, 1};

  __device__ KeyGates(const Fused& f, const Head& head, int key) {
    if (f.gate) of[0] = gate_of_key(f, head, key), of[1] = gate_of_key(f, head, key + 8);
  }
  template <int columns>
  __device__ __forceinline__ void multiply(const Fused&, const Head&, int,
                                           float (&x)[columns][4]) const {
#pragma unroll
    for (int j = 0; j < 4 * columns; ++j) x[j / 4][j % 4] *= of[j % 4 / 2];
  }
};
// Without decay, holding them is slower: most rows have no gates.
template <class W>
using GatesOf = KeyGates<kHasDecay<W>>;
}  // namespace horner::attn::kernels::cuda

// Running sums of a thread's rows in forward: products become weights, which are summed; then the
// epilogue.
#pragma once

#include <type_traits>

#include "attn/kernels/cuda/common/epilogue.cuh"
#include "attn/kernels/cuda/common/scores.cuh"
#include "attn/kernels/cuda/common/special.cuh"

namespace horner::attn::kernels::cuda {

// Decay of a key in shared memory: first the copied running sum of log gates, then `log2_decay` and
// the decay factor.
union KeyDecaySlot {
  double gates;
  float2 decay;
};

// A thread's rows: i and i + 8 of each 16-row atom. `factored`: with decay or a centre
// (kHasDecayFactors).
template <class T, int C, class W, class Shape, bool factored = false>
struct RunningSums {
  static constexpr int kAtoms = Shape::kAtoms, kTiles = Shape::kKeys / 8;
  // Exp is relative to the largest score so far. Unbounded weights that are rounded to float16 are
  // relative to their largest, to stay in range.
  static constexpr bool kIsExp = std::is_same_v<W, Exp>;
  static constexpr bool kScaled = std::is_same_v<W, Polynomial> && std::is_same_v<T, fp16>;
  // Whether it has code for changed scores, of which the decay of exp is one.
  static constexpr bool kChanges = Shape::kDecay && (factored || !kHasDecayFactors<T, W>);
  // Whether `f.rest` may be wanted.
  static constexpr bool kHasRest =
      sizeof(T) == 2 &&
      (std::is_same_v<T, fp16> || std::is_same_v<W, RuntimeWeight> || kIsSpecial<Shape>);
  using Products = float[kAtoms][kTiles][4];

  const Fused& f;
  const W& w;
  const Head& head;
  int t0;  // first row of the thread
  float N[kAtoms][C / 8][4];
  float sum[kAtoms][2], shift[kAtoms][2];  // sum: over this thread's columns
  float centre[kAtoms][2];
  float log_decay[kAtoms][2], per_scale;  // if `factored`
  float factor[2 * kAtoms];               // rescales N to the shift of the current tile
  bool raised;                            // some row of the warp needs it
  bool fresh;                             // some row of the warp has no shift yet

  __device__ RunningSums(const Fused& f, const W& w, const Head& head, int t0)
      : f(f), w(w), head(head), t0(t0), N{}, raised(false), fresh(true) {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      sum[i / 2][i % 2] = 0, shift[i / 2][i % 2] = -INFINITY;
      centre[i / 2][i % 2] = f.centre ? f.centre[row(i)] : 0;
    }
  }
  __device__ void set_decay(double reference) {
    per_scale = 1 / f.scale;
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i)
      log_decay[i / 2][i % 2] =
          f.decay ? log2_decay(gates_at_query(f, head, query(i)), reference) : 0;
  }
  __device__ int query(int i) const { return t0 + i / 2 * 16 + i % 2 * 8; }
  __device__ int64_t row(int i) const { return head.row(f, min(query(i), f.T - 1)); }
  static __device__ float finite(float shift) { return shift == -INFINITY ? 0 : shift; }

  // The thread's elements of its row i: two of every eight columns.
  static __device__ Vec<2 * kTiles> of_row(const Products& x, int i) {
    return vec<2 * kTiles>([&](int j) { return x[i / 2][j / 2][i % 2 * 2 + j % 2]; });
  }
  static __device__ void set_row(Products& x, int i, const Vec<2 * kTiles>& y) {
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) x[i / 2][j / 2][i % 2 * 2 + j % 2] = y[j];
  }

  // Raises each row's shift where its tile needs it and rescales its sum; `rescale` does N. Weights
  // may grow to e^slack before that, since any shift is valid.
  static constexpr float kSlack = 5;
  template <class Top>
  __device__ __forceinline__ void raise_shift(const Top& top, float slack = kSlack) {
    raised = false;
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      float& now = shift[i / 2][i % 2];
      const float tile_max = quad_max(top(i)), next = tile_max > now + slack ? tile_max : now;
      factor[i] = exp_fast(now - finite(next));
      raised |= next > now;
      now = next;
      sum[i / 2][i % 2] *= factor[i];
    }
    raised = __any_sync(~0u, raised);
  }
  // The same for a tile of which shift 0 is right.
  __device__ __forceinline__ void raise_to_zero() {
    bool below = false;
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) below |= shift[i / 2][i % 2] < 0;
    raised = false;
    if (__any_sync(~0u, below)) raise_shift([](int) { return 0.f; }, 0);
  }
  __device__ void rescale() {
    if constexpr (kIsExp || kScaled) {
      if (!raised) return;
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i)
#pragma unroll
        for (int j = 0; j < C / 8; ++j) {
          N[i / 2][j][i % 2 * 2] *= factor[i];
          N[i / 2][j][i % 2 * 2 + 1] *= factor[i];
        }
    }
  }

  // From products to weights, in place; adds them to the sum. Without `find_max`, exp rows keep
  // their shift: if their sums get too large, nothing is added and the result is false.
  __device__ __forceinline__ void to_weights(Path path, Products& x, int s0, const double* gates) {
    with_degree(w, degree_of(w), [&](const auto& weight) __attribute__((always_inline)) {
      to_weights(weight, path, x, s0, gates, true);
    });
  }
  // The same with a weight specialized by degree, if it has one.
  template <class Weight>
  __device__ __forceinline__ bool to_weights(const Weight& weight, Path path, Products& x, int s0,
                                             const double* gates, bool find_max) {
    constexpr bool kOnePath = kIsSpecial<Shape> && !factored;  // less to compile
    float parts[2 * kAtoms];
    if constexpr (!kOnePath)
      if (path == Path::plain) to_weights<Path::plain>(weight, x, s0, gates, find_max, parts);
    if constexpr (!kOnePath && (!factored || kIsExp))
      if (path == Path::clamp) to_weights<Path::clamp>(weight, x, s0, gates, find_max, parts);
    if (kOnePath || path == Path::general)
      to_weights<Path::general>(weight, x, s0, gates, find_max, parts);
    if constexpr (kSkipsMax) {
      bool over = false;
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) over |= !(parts[i] <= kMaxPartialSum);
      if (__any_sync(~0u, over) && !find_max) return false;
    }
    if constexpr (!kScaled)
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) sum[i / 2][i % 2] += parts[i];
    return true;
  }
  // Exp rows first try the current shift without finding the largest score; not with 128 channels
  // and decay factors, where that would take registers.
  static constexpr bool kSkipsMax = kIsExp && !(factored && C == 128);
  // Limit of a thread's partial sum over a tile before shifts are raised. Weights are rounded to T,
  // and squares of their sums are floats.
  static constexpr float kMaxPartialSum = std::is_same_v<T, bf16>   ? 0x1p30f
                                          : std::is_same_v<T, fp16> ? 0x1p12f
                                                                    : 148;
  template <Path path, class Weight>
  __device__ __forceinline__ void to_weights(const Weight& weight, Products& x, int s0,
                                             const double* gates, bool find_max,
                                             float (&parts)[2 * kAtoms]) {
    const int first = s0 + lane() % 4 * 2;
    Vec<2 * kTiles> keys;
    if constexpr (factored && !kIsExp)
      if (f.decay) keys = key_decay<path>(gates + lane() % 4 * 2);
    if constexpr (kChanges)
      if (changes_scores(f)) change_scores(x, first, gates + lane() % 4 * 2);
    if constexpr (path == Path::general && kIsExp) {
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) {
        const uint32_t seen = seen_keys<2 * kTiles>(sight<Shape>(f), head.b, query(i), first);
        const auto y = of_row(x, i);
        set_row(x, i, vec<2 * kTiles>([&](int j) { return seen >> j & 1 ? y[j] : -INFINITY; }));
      }
    }
    if (kIsExp && find_max) {
      const auto top = [&](int i) {
        const float top = reduce4(of_row(x, i), [](float a, float b) { return fmaxf(a, b); });
        return fminf(top * f.scale - centre[i / 2][i % 2], most());
      };
      raise_shift(top, kSkipsMax ? 0 : kSlack);
      rescale();
      bool none = false;
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) none |= shift[i / 2][i % 2] == -INFINITY;
      fresh = __any_sync(~0u, none);
    }
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      auto y = value<path>(weight, of_row(x, i), i, first);
      if constexpr (factored && !kIsExp) {
        if (f.decay) decay_row<path>(y, i, keys);
      } else if constexpr (path == Path::general && Shape::kDecay && !kHasDecayFactors<T, W>)
        if (f.decay && !f.decay_in_scores) {
          const double here = gates_at_query(f, head, query(i));
#pragma unroll
          for (int j = 0; j < 2 * kTiles; ++j)
            y[j] *= decay_factor(here, gates[first - s0 + j / 2 * 8 + j % 2]);
        }
      if constexpr (!kScaled) parts[i] = sum_of(y);
      if constexpr (std::is_same_v<W, RuntimeWeight>)
        y = vec<2 * kTiles>([&](int j) { return in_numerator(w, y[j]); });
      set_row(x, i, y);
    }
    if constexpr (kScaled) rescale_by_max(x);
  }
  __device__ float most() const { return kChanges ? last_clamp(f) : f.clamp; }
  // `gates`: those of the thread's first key.
  __device__ void change_scores(Products& x, int first, const double* gates) const {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      const double here = !factored && f.decay ? gates_at_query(f, head, query(i)) : 0;
      const float per = __frcp_rn(f.scale * kLog2e);
      auto y = of_row(x, i);
#pragma unroll
      for (int j = 0; j < 2 * kTiles; ++j) {
        const int at = j / 2 * 8 + j % 2;
        const float bias = bias_of(f, head, query(i), first + at);
        y[j] = changed_score<T>(f, y[j], bias, centre[i / 2][i % 2]).x;
        if (!f.decay_in_scores) continue;
        const float decay =
            factored ? log_decay[i / 2][i % 2] - reinterpret_cast<const float2*>(gates)[at].x
                     : log2_decay(here, gates[at]);
        y[j] = with_log2_decay(y[j], decay, per);
      }
      set_row(x, i, y);
    }
  }
  // The thread's columns: log2_decay; or, where the reference is before every query and after every
  // key, the factors.
  template <Path path>
  static __device__ __forceinline__ Vec<2 * kTiles> key_decay(const double* gates) {
    Vec<2 * kTiles> y;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float4 two = *reinterpret_cast<const float4*>(gates + 8 * j);
      y[2 * j] = path == Path::general ? two.x : two.y;
      y[2 * j + 1] = path == Path::general ? two.z : two.w;
    }
    return y;
  }
  template <Path path>
  __device__ __forceinline__ void decay_row(Vec<2 * kTiles>& y, int i,
                                            const Vec<2 * kTiles>& keys) const {
    const float here = log_decay[i / 2][i % 2];
    if constexpr (path == Path::general)
      y = vec<2 * kTiles>([&](int j) { return y[j] * decay_between(here, keys[j]); });
    else
      y = y * (keys * exp2_fast(here));
  }
  // Four independent chains hide latency.
  template <class F>
  static __device__ __forceinline__ float reduce4(const Vec<2 * kTiles>& y, const F& f) {
    Vec<4> some = vec<4>([&](int j) { return y[j]; });
#pragma unroll
    for (int j = 4; j < 2 * kTiles; ++j) some[j % 4] = f(some[j % 4], y[j]);
    return f(f(some[0], some[1]), f(some[2], some[3]));
  }
  __device__ __forceinline__ float sum_of(const Vec<2 * kTiles>& y) const {  // for W
    if constexpr (std::is_same_v<W, RuntimeWeight>)
      if (w.kind == RuntimeWeight::softpick)
        return reduce4(y, [](float a, float b) { return fabsf(a) + fabsf(b); });
    return reduce4(y, [](float a, float b) { return a + b; });
  }
  __device__ void add(const Vec<2 * kTiles>& y, int i) { sum[i / 2][i % 2] += sum_of(y); }
  template <Path path, class Weight>
  __device__ __forceinline__ Vec<2 * kTiles> value(const Weight& weight, const Vec<2 * kTiles>& x,
                                                   int i, int first) const {
    const float by = kIsExp ? finite(shift[i / 2][i % 2]) : 0;
    const float sub = (centre[i / 2][i % 2] + by) * unit_of_sub(kIsExp, sizeof(T) == 4);
    const float limit = (most() - by) * kUnit<W>;
    auto y = x;
    if constexpr (Shape::kRaw && kIsFixedDegree<Weight>) {
      if constexpr (factored) y = y + -centre[i / 2][i % 2] * per_scale;
      if constexpr (path != Path::plain) y = min_nan(y, most() / f.scale);
    } else {
      y = vec<2 * kTiles>([&](int j) { return shifted<T, W>(x[j], f.scale, sub); });
      if constexpr (path != Path::plain) y = min_nan(y, limit);
    }
    if constexpr (std::is_same_v<W, RuntimeWeight>) {
      const RowThreshold threshold = f.thresholds ? f.thresholds[row(i)] : RowThreshold{};
      y = vec<2 * kTiles>([&](int j) { return weight_jacobian(w, y[j], threshold).w; });
    } else {
      y = weights_of(weight, y);
    }
    if constexpr (path == Path::general && !kIsExp) {
      const uint32_t seen = seen_keys<2 * kTiles>(sight<Shape>(f), head.b, query(i), first);
      y = vec<2 * kTiles>([&](int j) { return seen >> j & 1 ? y[j] : 0; });
    }
    return y;
  }
  // Makes weights relative to the largest so far.
  __device__ void rescale_by_max(Products& x) {
    raise_shift([&](int i) {
      const auto y = of_row(x, i);
      float top = 0;
#pragma unroll
      for (int j = 0; j < 2 * kTiles; ++j) top = fmaxf(top, fabsf(y[j]));
      return logf(top);
    });
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      const auto y = of_row(x, i) * exp_fast(-finite(shift[i / 2][i % 2]));
      add(y, i);
      set_row(x, i, y);
    }
  }

  __device__ void scale_sums(float by) {
#pragma unroll
    for (int i = 0; i < kAtoms * C / 2; ++i) N[i / (C / 2)][i / 4 % (C / 8)][i % 4] *= by;
  }
  static __device__ int channel(int j) { return j / 2 * 8 + lane() % 4 * 2 + j % 2; }
  // The epilogue of row i, and what backward needs of it: from N to u, returns r. `scale` goes from
  // u to the result.
  __device__ float normalise(int i) {
    const float W_t = quad_sum(sum[i / 2][i % 2]);
    const int64_t at = row(i);
    float by = finite(shift[i / 2][i % 2]);
    if constexpr (std::is_same_v<W, RuntimeWeight>)
      if (w.kind == RuntimeWeight::softpick) by = f.thresholds[at].top;
    auto x = vec<C / 4>([&](int j) { return N[i / 2][j / 2][i % 2 * 2 + j % 2]; });
    const auto [r, mean] = norm_row(f.epilogue, f.channels, at, x, W_t, by, channel,
                                    [](float y) { return quad_sum(y); });
#pragma unroll
    for (int j = 0; j < C / 4; ++j) N[i / 2][j / 2][i % 2 * 2 + j % 2] = x[j];
    if (f.W && lane() % 4 == 0 && query(i) < f.T) {
      f.W[at] = W_t, f.shift[at] = by, f.r[at] = r;
      if constexpr (kExactAlongRow<T> || kHasRest)
        if (f.mean) f.mean[at] = mean;
    }
    return r;
  }
  __device__ void scale(int i, float r) {
    const Epilogue& p = f.epilogue;
    const float on = r == 0 ? 0 : p.post_gate ? p.post_gate[row(i)] : 1;
    if (!p.norm_weight && !p.norm_bias && on == 1) return;
    auto x = vec<C / 4>([&](int j) { return N[i / 2][j / 2][i % 2 * 2 + j % 2]; });
    apply_norm_weight(p, f.channels, x, channel);
#pragma unroll
    for (int j = 0; j < C / 4; ++j) N[i / 2][j / 2][i % 2 * 2 + j % 2] = on * x[j];
  }
  // Two rows with one read of the norm's weight and bias.
  __device__ void scale_both(const float (&r)[2]) {
    const Epilogue& p = f.epilogue;
    const auto each = [&](const auto& g) __attribute__((always_inline)) {
#pragma unroll
      for (int j = 0; j < C / 4; ++j) g(j, N[0][j / 2][j % 2], N[0][j / 2][2 + j % 2]);
    };
    if (f.channels == C) {
      const float *const w = p.norm_weight + channel(0), *const b = p.norm_bias + channel(0);
      const auto at = [](int j) { return j / 2 * 8 + j % 2; };
      if (p.norm_weight) each([&](int j, float& x, float& y) { x *= w[at(j)], y *= w[at(j)]; });
      if (p.norm_bias) each([&](int j, float& x, float& y) { x += b[at(j)], y += b[at(j)]; });
    } else {
      const auto one = [&](const float* from, int j) {
        return channel(j) < f.channels ? from[channel(j)] : 0;
      };
      if (p.norm_weight)
        each([&](int j, float& x, float& y) {
          const float w = one(p.norm_weight, j);
          x *= w, y *= w;
        });
      if (p.norm_bias)
        each([&](int j, float& x, float& y) {
          const float b = one(p.norm_bias, j);
          x += b, y += b;
        });
    }
    float on[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) on[i] = r[i] == 0 ? 0 : p.post_gate ? p.post_gate[row(i)] : 1;
    if (on[0] == 1 && on[1] == 1) return;
    each([&](int, float& x, float& y) { x *= on[0], y *= on[1]; });
  }
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      const float r = normalise(i);
      if (f.u) store(f.u, i);
      if constexpr (kHasRest)
        if (f.rest) store<true>(f.rest, i);
      scale(i, r);
      store(f.o, i);
    }
  }
  template <bool rest = false>
  __device__ void store(void* rows, int i) const {  // called by all lanes
#pragma unroll
    for (int j = 0; j < C / 8; j += 4) {
      float x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float y = N[i / 2][j + c / 2][i % 2 * 2 + c % 2];
        x[c] = rest ? rest_of<T>(y) : y;
      }
      store_32<T>(rows, row(i) * f.E + 8 * j, f.E - 8 * j, query(i) < f.T, x);
    }
  }
};

}  // namespace horner::attn::kernels::cuda

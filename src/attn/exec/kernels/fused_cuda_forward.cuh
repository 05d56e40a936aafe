// Forward: a block of threads has a block of queries of one head, each warp some rows of it, and
// goes over the tiles of keys that they see. The weights of a tile stay in registers, where they
// are the left factor of the product with the values; the next tile is copied meanwhile.
#pragma once

#include <type_traits>

#include "attn/exec/kernels/fused_cuda_epilogue.cuh"
#include "attn/exec/kernels/fused_cuda_tiles.cuh"

namespace horner::attn::kernels::cuda {

template <class T, int C>
struct ForwardShape {
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kAtoms = !kWide && C <= 128 ? 2 : 1;  // of 16 rows, in a warp
  static constexpr bool kDecay = true;
  static constexpr bool kRaw = true;  // known degrees: of products before the scale
  static constexpr int kQueries = 16 * kAtoms * kWarps;
  static constexpr int kBlocks = kWide || C == 256 ? 1 : 2;  // at least, on a multiprocessor
  static constexpr int kTile = kWide ? (C == 256 ? 16 : 32) : C == 256 ? 32 : 64;  // keys
  static constexpr int kKeys = !kWide && C == 128 ? 32 : kTile;                    // taken at once
  static constexpr int kBytes = (kQueries + 4 * kTile) * C * int(sizeof(T)) + 2 * kTile * (8 + 4);
};

// The falls of a tile of keys, in shared memory: first as the running sums are copied there, then
// `fallen` and the factor of each key.
union KeyFall {
  double gates;
  float2 fall;
};

// The rows of a thread: `atoms` times the rows i and i + 8 of sixteen. `falls`: with decay or a
// centre (kHasFalls).
template <class T, int C, class W, class Shape = ForwardShape<T, C>, bool falls = false>
struct RunningSums {
  static constexpr int kAtoms = Shape::kAtoms, kTiles = Shape::kKeys / 8;
  // Exp is taken relative to the largest score so far; so is, to stay in its range, any weight
  // without a bound that is rounded to float16.
  static constexpr bool kIsExp = std::is_same_v<W, Exp>;
  static constexpr bool kScaled = std::is_same_v<W, Polynomial> && std::is_same_v<T, fp16>;
  using Products = float[kAtoms][kTiles][4];

  const Fused& f;
  const W& w;
  const Head& head;
  int t0;  // the first row of the thread
  float N[kAtoms][C / 8][4];
  float sum[kAtoms][2], shift[kAtoms][2];  // sum: of this thread's columns
  float centre[kAtoms][2];
  float fall[kAtoms][2], per_scale;  // of `falls`
  float factor[2 * kAtoms];          // what brings N to the scale of the tile at hand
  bool raised;                       // whether there is one, in some row of the warp

  __device__ RunningSums(const Fused& f, const W& w, const Head& head, int t0)
      : f(f), w(w), head(head), t0(t0), N{}, raised(false) {
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      sum[i / 2][i % 2] = 0, shift[i / 2][i % 2] = -INFINITY;
      centre[i / 2][i % 2] = f.centre ? f.centre[row(i)] : 0;
    }
  }
  __device__ void set_falls(double reference) {
    per_scale = 1 / f.scale;
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i)
      fall[i / 2][i % 2] = f.decay ? fallen(gates_at_query(f, head, query(i)), reference) : 0;
  }
  __device__ int query(int i) const { return t0 + i / 2 * 16 + i % 2 * 8; }
  __device__ int64_t row(int i) const { return head.row(f, min(query(i), f.T - 1)); }
  static __device__ float finite(float shift) { return shift == -INFINITY ? 0 : shift; }

  // The thread's numbers in its row i: two of every eight columns.
  static __device__ Lanes<2 * kTiles> of_row(const Products& x, int i) {
    return lanes<2 * kTiles>([&](int j) { return x[i / 2][j / 2][i % 2 * 2 + j % 2]; });
  }
  static __device__ void set_row(Products& x, int i, const Lanes<2 * kTiles>& y) {
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) x[i / 2][j / 2][i % 2 * 2 + j % 2] = y[j];
  }

  // Raises the shift of each row where its tile needs it; what has been summed is brought to the
  // new scale, N by `rescale`. Weights may grow to e^kSlack before that, since any shift will do.
  static constexpr float kSlack = 5;
  template <class Top>
  __device__ __forceinline__ void raise(const Top& top) {
    raised = false;
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      float& now = shift[i / 2][i % 2];
      const float found = quad_max(top(i)), next = found > now + kSlack ? found : now;
      factor[i] = exp_fast(now - finite(next));
      raised |= next > now;
      now = next;
      sum[i / 2][i % 2] *= factor[i];
    }
    raised = __any_sync(~0u, raised);
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

  // From products to weights, in place; adds those to the sum.
  __device__ __forceinline__ void weigh(Care care, Products& x, int s0, const double* gates) {
    with_degree(w, degree_of(w), [&](const auto& weight) __attribute__((always_inline)) {
      weigh(weight, care, x, s0, gates);
    });
  }
  // The same with a weight of known degree, if it has one.
  template <class Weight>
  __device__ __forceinline__ void weigh(const Weight& weight, Care care, Products& x, int s0,
                                        const double* gates) {
    if (care == Care::none) weigh<Care::none>(weight, x, s0, gates);
    if constexpr (!falls)
      if (care == Care::clamp) weigh<Care::clamp>(weight, x, s0, gates);
    if (care == Care::any) weigh<Care::any>(weight, x, s0, gates);
  }
  template <Care care, class Weight>
  __device__ __forceinline__ void weigh(const Weight& weight, Products& x, int s0,
                                        const double* gates) {
    const int first = s0 + lane() % 4 * 2;
    Lanes<2 * kTiles> keys;
    if constexpr (falls)
      if (f.decay) keys = falls_of<care>(gates + lane() % 4 * 2);
    if constexpr (care == Care::any && kIsExp) {
#pragma unroll
      for (int i = 0; i < 2 * kAtoms; ++i) {
        const uint32_t seen = seen_keys<2 * kTiles>(f.seen, head.b, query(i), first);
        const auto y = of_row(x, i);
        set_row(x, i, lanes<2 * kTiles>([&](int j) { return seen >> j & 1 ? y[j] : -INFINITY; }));
      }
    }
    if constexpr (kIsExp)
      raise([&](int i) {
        const float top = by_fours(of_row(x, i), [](float a, float b) { return fmaxf(a, b); });
        return fminf(top * f.scale - centre[i / 2][i % 2], f.clamp);
      });
#pragma unroll
    for (int i = 0; i < 2 * kAtoms; ++i) {
      auto y = value<care>(weight, of_row(x, i), i, first);
      if constexpr (falls) {
        if (f.decay) fade_row<care>(y, i, keys);
      } else if constexpr (care == Care::any && Shape::kDecay && !kHasFalls<T, W>)
        if (f.decay) {
          const double here = gates_at_query(f, head, query(i));
#pragma unroll
          for (int j = 0; j < 2 * kTiles; ++j)
            y[j] *= fade(here, gates[first - s0 + j / 2 * 8 + j % 2]);
        }
      if constexpr (!kScaled) add(y, i);
      set_row(x, i, y);
    }
    if constexpr (kScaled) by_largest(x);
  }
  // Of the thread's columns: how far the gates have fallen; or, where every query stands behind the
  // reference and every key before it, the factors. Those of exp rows are in the exponent.
  template <Care care>
  static __device__ __forceinline__ Lanes<2 * kTiles> falls_of(const double* gates) {
    Lanes<2 * kTiles> y;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float4 two = *reinterpret_cast<const float4*>(gates + 8 * j);
      y[2 * j] = care == Care::any ? two.x : two.y;
      y[2 * j + 1] = care == Care::any ? two.z : two.w;
    }
    return y;
  }
  template <Care care>
  __device__ __forceinline__ void fade_row(Lanes<2 * kTiles>& y, int i,
                                           const Lanes<2 * kTiles>& keys) const {
    const float here = fall[i / 2][i % 2];
    if constexpr (care == Care::any)
      y = lanes<2 * kTiles>([&](int j) { return y[j] * fall_between(here, keys[j]); });
    else if constexpr (kIsExp)
      y = y * keys;
    else
      y = y * (keys * exp2_fast(here));
  }
  // Four results side by side, so that none waits long for the one before.
  template <class F>
  static __device__ __forceinline__ float by_fours(const Lanes<2 * kTiles>& y, const F& f) {
    Lanes<4> some = lanes<4>([&](int j) { return y[j]; });
#pragma unroll
    for (int j = 4; j < 2 * kTiles; ++j) some[j % 4] = f(some[j % 4], y[j]);
    return f(f(some[0], some[1]), f(some[2], some[3]));
  }
  __device__ void add(const Lanes<2 * kTiles>& y, int i) {
    sum[i / 2][i % 2] += by_fours(y, [](float a, float b) { return a + b; });
  }
  template <Care care, class Weight>
  __device__ __forceinline__ Lanes<2 * kTiles> value(const Weight& weight,
                                                     const Lanes<2 * kTiles>& x, int i,
                                                     int first) const {
    const float by = kIsExp ? finite(shift[i / 2][i % 2]) : 0;
    float sub = (centre[i / 2][i % 2] + by) * kUnit<W>;
    const float scale = f.scale * kUnit<W>;
    if constexpr (falls && kIsExp && care == Care::none) sub -= fall[i / 2][i % 2];
    auto y = x;
    if constexpr (Shape::kRaw && kOfDegree<Weight>) {
      if constexpr (falls) y = y + -centre[i / 2][i % 2] * per_scale;
      if constexpr (care != Care::none) y = at_most(y, f.clamp / f.scale);
    } else {
      y = lanes<2 * kTiles>([&](int j) { return x[j] * scale - sub; });
      if constexpr (care != Care::none) y = at_most(y, (f.clamp - by) * kUnit<W>);
    }
    if constexpr (std::is_same_v<W, Other>) {
      const Found found = f.found ? f.found[row(i)] : Found{};
      y = lanes<2 * kTiles>([&](int j) { return parts(w, y[j], found).w; });
    } else {
      y = weights_of(weight, y);
    }
    if constexpr (care == Care::any && !kIsExp) {
      const uint32_t seen = seen_keys<2 * kTiles>(f.seen, head.b, query(i), first);
      y = lanes<2 * kTiles>([&](int j) { return seen >> j & 1 ? y[j] : 0; });
    }
    return y;
  }
  // Weights that are relative to their largest so far.
  __device__ void by_largest(Products& x) {
    raise([&](int i) {
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

  static __device__ int channel(int j) { return j / 2 * 8 + lane() % 4 * 2 + j % 2; }
  // Denominator, gates and norm of row i, and what backward needs of it: from N to u, whose r is
  // returned; then from u to the result.
  __device__ float normalise(int i) {
    const float W_t = quad_sum(sum[i / 2][i % 2]), by = finite(shift[i / 2][i % 2]);
    const int64_t at = row(i);
    auto x = lanes<C / 4>([&](int j) { return N[i / 2][j / 2][i % 2 * 2 + j % 2]; });
    const float r = normed(f.epilogue, f.channels, at, x, W_t, by, channel,
                           [](float y) { return quad_sum(y); });
#pragma unroll
    for (int j = 0; j < C / 4; ++j) N[i / 2][j / 2][i % 2 * 2 + j % 2] = x[j];
    if (f.W && lane() % 4 == 0 && query(i) < f.T) f.W[at] = W_t, f.shift[at] = by, f.r[at] = r;
    return r;
  }
  __device__ void scale(int i, float r) {
    const Epilogue& p = f.epilogue;
    const float on = r == 0 ? 0 : p.post_gate ? p.post_gate[row(i)] : 1;
    if (!p.norm_weight && !p.norm_bias && on == 1) return;
    auto x = lanes<C / 4>([&](int j) { return N[i / 2][j / 2][i % 2 * 2 + j % 2]; });
    learned_scale(p, f.channels, x, channel);
#pragma unroll
    for (int j = 0; j < C / 4; ++j) N[i / 2][j / 2][i % 2 * 2 + j % 2] = on * x[j];
  }
  // Two rows with one look at the learned norm.
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
      scale(i, r);
      store(f.o, i);
    }
  }
  __device__ void store(void* rows, int i) const {  // by all lanes
#pragma unroll
    for (int j = 0; j < C / 8; j += 4) {
      float x[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] = N[i / 2][j + c / 2][i % 2 * 2 + c % 2];
      store_32<T>(rows, row(i) * f.E + 8 * j, f.E - 8 * j, query(i) < f.T, x);
    }
  }
};

template <class T, int C, class W, bool falls, bool gated>
__global__ __launch_bounds__(
    ForwardShape<T, C>::kThreads,
    ForwardShape<T, C>::kBlocks) void forward_kernel(const __grid_constant__ Fused f,
                                                     const __grid_constant__ W w) {
  using Shape = ForwardShape<T, C>;
  constexpr int kTile = Shape::kTile, kQueries = Shape::kQueries, kThreads = Shape::kThreads;
  constexpr int kBytes = kTile * C * int(sizeof(T));
  extern __shared__ __align__(1024) unsigned char memory[];
  const Tile<T, C> q{shared_address(memory)};
  const Tile<T, C> first_tile{q.at + kQueries * C * int(sizeof(T))};
  double* const gates = reinterpret_cast<double*>(memory + (kQueries + 4 * kTile) * C * sizeof(T));
  float* const input_gates = reinterpret_cast<float*>(gates + 2 * kTile);

  const int blocks = (f.T + kQueries - 1) / kQueries;
  const Place place(int(blockIdx.x), f.B * f.H, blocks);
  const Head head(f, place.head);
  const int t0 = (blocks - 1 - place.block) * kQueries;  // longest rows first
  const int begin = f.seen.lo(t0) / kTile * kTile, end = f.seen.hi(min(t0 + kQueries, f.T) - 1);
  const auto copy_keys = [&](int s0, int stage) {
    const Tile<T, C> k{first_tile.at + 2 * stage * kBytes}, v{k.at + kBytes};
    copy_rows<kTile, kThreads>(k, row_of<T>(f.k, head.b, head.g, s0), f.k.row, f.S - s0, f.D);
    copy_rows<kTile, kThreads>(v, row_of<T>(f.v, head.b, head.g, s0), f.v.row, f.S - s0, f.E);
    if (const int n = int(threadIdx.x); falls && f.decay && n < kTile)
      copy_8_bytes(shared_address(gates + stage * kTile + n),
                   f.decay + head.key(f, min(s0 + n, f.S - 1)));
    if (gated && f.gate) copy_gates<kTile>(f, head, s0, input_gates + stage * kTile);
  };
  copy_rows<kQueries, kThreads>(q, row_of<T>(f.q, head.b, head.h, t0), f.q.row, f.T - t0, f.D);
  if (begin < end) copy_keys(begin, 0);

  const int own = warp() * 16 * Shape::kAtoms;
  const Care plain = f.clamp < INFINITY ? Care::clamp : Care::none;
  const Sight sight = keys_seen_by(f.seen, t0 + own, t0 + own + 16 * Shape::kAtoms);
  RunningSums<T, C, W, Shape, falls> sums(f, w, head, t0 + own + lane() / 4);
  const double reference = falls && f.decay ? gates_at_query(f, head, t0) : 0;
  if constexpr (falls) sums.set_falls(reference);
  const auto over_keys = [&](const auto& weight) __attribute__((always_inline)) {
    int stage = 0;
    for (int s0 = begin; s0 < end; s0 += kTile, stage ^= 1) {
      const Tile<T, C> k{first_tile.at + 2 * stage * kBytes}, v{k.at + kBytes};
      if (!kHasFalls<T, W> && f.decay && threadIdx.x < kTile)
        gates[stage * kTile + threadIdx.x] = gates_at_key(f, head, s0 + int(threadIdx.x));
      wait_for_copies();
      if (falls && f.decay && threadIdx.x < kTile) {  // what this thread has copied
        KeyFall& key = reinterpret_cast<KeyFall*>(gates)[stage * kTile + threadIdx.x];
        const float fall = fallen(key.gates, reference);
        key.fall = make_float2(fall, exp2_fast(-fall));
      }
      __syncthreads();  // this tile is there, and all are done with the one before
      if (s0 + kTile < end) copy_keys(s0 + kTile, stage ^ 1);
#pragma unroll 1
      for (int at = 0; at < kTile; at += Shape::kKeys) {
        const int s = s0 + at, s1 = s + Shape::kKeys;
        if (sight.nothing_of(s, s1)) continue;
        float x[Shape::kAtoms][Shape::kKeys / 8][4];
        rows_by_rows<T>(x, q, own, k, at);
        // With falls also where not all of these keys stand before the reference.
        const bool apart = falls ? f.clamp < INFINITY || (f.decay && s1 > t0 + f.S - f.T + 1)
                                 : !kHasFalls<T, W> && f.decay;
        const bool any = apart || !sight.all_of(s, s1);
        sums.weigh(weight, any ? Care::any : plain, x, s, gates + stage * kTile + at);
        sums.rescale();
        if (gated && f.gate) gate_columns(input_gates + stage * kTile + at, x);
        add_sums_by_columns<T>(sums.N, x, v, at);
      }
    }
  };
  if constexpr (falls) {
    with_common_degree(w, degree_of(w), over_keys);
  } else if constexpr (Shape::kWide) {
    with_any_degree(w, over_keys);
  } else {
    with_degree(w, knows_degrees<T>(f) ? degree_of(w) : 0, over_keys);
  }
  if (begin >= end) wait_for_copies();
  sums.finish();
}

}  // namespace horner::attn::kernels::cuda

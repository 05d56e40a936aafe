// Compiled once per instruction set, like fused.cpp. Forward, for each block of queries: the strip
// of scores x_ts, the threshold of each row, the weights in place of the scores, and N = w v.
// Backward: recompute the strip, then dw_ts = decay_ts (v_s.dN_t + dW_t) and dx (weights.h).
#include "attn/kernels/cpu/rows/rows.h"

#include "attn/kernels/cpu/dropout.h"
#include "attn/kernels/cpu/fused/statistics.h"
#include "attn/kernels/cpu/rows/weights.h"
#include "core/simd/gemm.h"

namespace horner::attn::kernels::HORNER_ISA {

// A block of queries of one head, and the keys that any of them sees.
struct Block {
  const Rows& f;
  int64_t b, h, g, t0;  // batch, head, key head, first query
  int rows;
  int64_t s0, width;  // rounded to whole tiles

  Block(const Rows& f, int64_t head, int64_t index)
      : f(f), b(head / f.H), h(head % f.H), g(h / (f.H / f.G)), t0(index * kStrip) {
    rows = int(f.T - t0 < kStrip ? f.T - t0 : kStrip);
    s0 = first_key(0) / kTile * kTile;
    const int64_t last = hi(rows - 1);
    width = last > s0 ? blocks(last - s0) * kTile : 0;
  }
  int lo(int i) const { return f.seen.lo[t0 + i]; }
  int hi(int i) const { return f.seen.hi[b * f.seen.per_batch + t0 + i]; }
  int first_key(int i) const { return f.seen.from ? f.seen.from[t0 + i] : lo(i); }
  int64_t row(int i) const { return (b * f.H + h) * f.T + t0 + i; }
  int64_t key_head() const { return b * f.G + g; }
  int64_t key(int64_t j) const { return key_head() * f.S + s0 + j; }
  int columns(int64_t j) const { return int(f.S - s0 - j < kTile ? f.S - s0 - j : kTile); }
  int64_t tile(int64_t j) const { return (key_head() * blocks(f.S) + (s0 + j) / kTile) * kTile; }

  // Which of the kWidth keys from j query i sees.
  VecInt seen(int i, int64_t j) const {
    const VecInt s = lanes(int(s0 + j));
    VecInt yes = (s >= lo(i)) & (s < hi(i));
    if (f.seen.from) yes |= (s >= f.seen.from[t0 + i]) & (s < f.seen.to[t0 + i]);
    if (!f.keep) return yes;
    VecInt kept{};
    for (int l = 0; l < kWidth && s0 + j + l < f.S; ++l)
      kept[l] = -(f.keep[b * f.S + s0 + j + l] != 0);
    return yes & kept;
  }
  bool all_seen(int i, int64_t j) const {
    return !f.keep && s0 + j >= lo(i) && s0 + j + kWidth <= hi(i);
  }
  float first_weight(int i, const float* row) const {  // of the first key of query i
    const int64_t j = first_key(i) - s0;
    return j >= 0 && j < width ? fabsf(row[j]) : 0;
  }
  // Of query i and the kWidth keys from j, in the bias or its gradient; `n` of them are keys.
  int64_t pair(int i, int64_t j) const {
    return b * f.bias_batch + h * f.bias_head + (t0 + i) * f.S + s0 + j;
  }
  int keys(int64_t j) const { return int(f.S - s0 - j < kWidth ? f.S - s0 - j : kWidth); }
  Vec bias(int i, int64_t j) const {
    const float* at = f.bias + pair(i, j);
    if (keys(j) == kWidth) return load(at);
    Vec y{};
    for (int l = 0; l < keys(j); ++l) y[l] = at[l];
    return y;
  }
  void add_d_bias(int i, int64_t j, Vec dx) const {
    float* at = f.d_bias + pair(i, j);
    if (keys(j) == kWidth) return store(at, load(at) + dx);
    for (int l = 0; l < keys(j); ++l) at[l] += dx[l];
  }
  // The product of the decay gates in (s, t], for kWidth keys from j; 1 where the query does not
  // see the key.
  Vec decay_factor(int i, int64_t j) const {
    const double* gate = f.decay + key_head() * f.S;
    const int64_t position = t0 + i + f.S - f.T;
    const double query = gate[position > 0 ? position : 0];
    float x[kWidth];
    for (int l = 0; l < kWidth; ++l) x[l] = s0 + j + l < f.S ? float(query - gate[s0 + j + l]) : 0;
    return exp(all_seen(i, j) ? load(x) : choose(seen(i, j), load(x), Vec{}));
  }
};

// Drops pairs of query i.
static void drop(const Block& k, int i, float* x) {
  const Dropout& d = k.f.dropout;
  if (d.below) drop(d, dropout_row(d.seed, k.b, k.h, k.t0 + i), k.s0, k.width, x);
}

// x = a tiles: rows a [rows, channels] times the keys in tiles [.., channels, kTile].
static void products(const Block& k, const float* a, int64_t channels, const float* tiles,
                     float* x) {
  for (int64_t j = 0; j < k.width; j += kTile)
    multiply<false>({a, channels, 1, tiles + k.tile(j) * channels, kTile, x + j, k.f.stride, k.rows,
                     kTile, int(channels)});
}

// Subtracts from row i its mean over the keys that it sees.
static void centre(const Block& k, int i, float* x) {
  Vec total{};
  VecInt count{};
  for (int64_t j = 0; j < k.width; j += kWidth) {
    const VecInt seen = k.seen(i, j);
    total += choose(seen, load(x + j), Vec{});
    count -= seen;
  }
  const float mean = sum(total) / greater(1, sum(__builtin_convertvector(count, Vec)));
  for (int64_t j = 0; j < k.width; j += kWidth)
    store(x + j, load(x + j) - choose(k.seen(i, j), splat(mean), Vec{}));
}

// Caps the scores of query i, whose derivatives go to `slopes` unless it is null, and adds the
// bias.
static void cap_and_add_bias(const Block& k, int i, float* x, float* slopes) {
  const Rows& f = k.f;
  for (int64_t j = 0; j < k.width; j += kWidth) {
    Vec y = load(x + j);
    if (f.softcap != 0) {
      const Vec share = tanh(y / f.softcap);
      y = share * f.softcap;
      if (slopes) store(slopes + j, 1 - share * share);
    }
    if (f.bias) y += k.bias(i, j);
    store(x + j, k.all_seen(i, j) ? y : choose(k.seen(i, j), y, splat(-INFINITY)));
  }
}

// From the products of query i to its scores, in place: -inf where masked. Computes `beta` unless
// it is given.
template <class W>
static void score(const W&, const Block& k, int i, float* x, float* beta, bool given,
                  float* slopes = nullptr) {
  const Rows& f = k.f;
  const float scale = f.scale[k.row(i)];
  for (int64_t j = 0; j < k.width; j += kWidth) {
    const Vec y = load(x + j) * scale;
    store(x + j, k.all_seen(i, j) ? y : choose(k.seen(i, j), y, splat(-INFINITY)));
  }
  if (!given) *beta = f.adaptive ? sharpness({x, k.width, nullptr}) : 1;
  if (*beta != 1)
    for (int64_t j = 0; j < k.width; j += kWidth) store(x + j, load(x + j) * *beta);
  if (f.softcap != 0 || f.bias) cap_and_add_bias(k, i, x, slopes);
  if constexpr (__is_same(W, SelfAdjusted))  // a score of -inf that is seen leaves no range
    for (int64_t j = 0; j < k.width; j += kWidth) {
      const Vec y = load(x + j);
      store(x + j, choose(k.seen(i, j) & (y == -INFINITY), splat(NAN), y));
    }
  if (!f.centred && f.clamp == INFINITY) return;
  if (f.centred) centre(k, i, x);
  for (int64_t j = 0; j < k.width; j += kWidth) store(x + j, min(splat(f.clamp), load(x + j)));
}

template <class W>
static void forward(const W& w, const Block& k, float* x, float* spare) {
  const Rows& f = k.f;
  products(k, f.q + k.row(0) * f.D, f.D, f.k_tiles, x);
  for (int i = 0; i < k.rows; ++i) {
    float* const row = x + i * f.stride;
    RowThreshold r{};
    score(w, k, i, row, &r.beta, false);
    const Scores scores{row, k.width, spare};
    r.top = top(scores);
    if (r.top == -INFINITY)
      r.top = 0, r.sum = 1;  // the row sees no key
    else if (r.top == r.top)
      find_threshold(w, scores, r);
    if constexpr (__is_same(W, StickBreaking)) break_sticks(row, k.width, row);
    Vec total{}, only_summed{};  // W is both
    RowStatistics statistics;
    for (int64_t j = 0; j < k.width; j += kWidth) {
      Parts p = parts(w, load(row + j), r);
      if constexpr (__is_same(W, Softpick)) p.less = choose(k.seen(i, j), p.less, Vec{});
      if (f.decay) {
        const Vec factor = k.decay_factor(i, j);
        p.w *= factor, p.less *= factor;
      }
      if (r.top != r.top) p.w = splat(NAN);
      store(row + j, p.w);
      total += p.w, only_summed += p.less;
      if (f.statistics) statistics.add(p.w);
    }
    if (f.statistics) {
      statistics.first = k.first_weight(i, row);
      const float whole = sum(total);
      write(&statistics, &whole, 1, false, f.statistics + k.row(i), f.B * f.H * f.T);
    }
    drop(k, i, row);
    f.thresholds[k.row(i)] = r;
    f.W[k.row(i)] = sum(total + only_summed);
  }
  float* N = f.N + k.row(0) * f.E;
  for (int64_t i = 0; i < k.rows * f.E; ++i) N[i] = 0;
  for (int64_t j = 0; j < k.width; j += kTile)
    multiply<true>(
        {x + j, f.stride, 1, f.v + k.key(j) * f.E, f.E, N, f.E, k.rows, int(f.E), k.columns(j)});
}

// Terms that all score gradients of a row share: sum pull dw, and for SelfAdjusted the gradients of
// the smallest and the largest score times their range, divided evenly among the keys that have it.
struct Shared {
  float pull, at_low, at_high;
};

// Replaces dp = v.dN by dw.
template <class W>
static Shared shared(const W& w, const Block& k, int i, const float* x, float* dp,
                     const RowThreshold& r) {
  const Vec dW = splat(k.f.dW[k.row(i)]);
  const Vec low = splat(r.cut), high = splat(greater(r.top, 0));
  Vec pull{}, share{};
  VecInt lowest{}, highest{};
  for (int64_t j = 0; j < k.width; j += kWidth) {
    const Parts p = parts(w, load(x + j), r);
    Vec dw = load(dp + j) + dW;
    if constexpr (__is_same(W, Softpick)) dw = d_weight(p, load(dp + j), dW);
    if (!k.all_seen(i, j)) dw = choose(k.seen(i, j), dw, Vec{});
    if (k.f.decay) dw *= k.decay_factor(i, j);
    store(dp + j, dw);
    pull += p.pull * dw;
    if constexpr (__is_same(W, SelfAdjusted)) {
      share += p.share * dw;
      lowest -= load(x + j) == low;
      highest -= load(x + j) == high;
    }
  }
  Shared s{sum(pull), 0, 0};
  if constexpr (__is_same(W, SelfAdjusted)) {
    s.at_low = (s.pull - sum(share)) / greater(1, sum(__builtin_convertvector(lowest, Vec)));
    s.at_high = -s.pull / greater(1, sum(__builtin_convertvector(highest, Vec)));
  }
  return s;
}

// From the products x and dp = v.dN of query i to its weights (in x) and the gradients of the
// products (in dp).
template <class W>
static void slopes(const W& w, const Block& k, int i, float* x, float* dp, double* d_decay_key,
                   float* spare) {
  const Rows& f = k.f;
  const int64_t row = k.row(i);
  RowThreshold r = f.thresholds[row];
  float *const weights = spare, *const cap_slopes = spare + f.stride;
  score(w, k, i, x, &r.beta, true, cap_slopes);
  if constexpr (__is_same(W, StickBreaking)) break_sticks(x, k.width, weights);
  const Shared s = shared(w, k, i, x, dp, r);
  const Vec low = splat(r.cut), high = splat(greater(r.top, 0));
  double d_decay = 0, d_before = 0;
  for (int64_t j = 0; j < k.width; j += kWidth) {
    const Vec y = load(x + j), dw = load(dp + j);
    Parts p = parts(w, y, r);
    if constexpr (__is_same(W, StickBreaking)) p.w = load(weights + j);
    if (r.top != r.top) p.w = p.slope = choose(k.seen(i, j), splat(NAN), Vec{}), p.share = Vec{};
    Vec dx = p.slope * dw - p.share * s.pull;
    if constexpr (__is_same(W, SelfAdjusted))
      dx += (p.share * dw + choose(y == low, splat(s.at_low), Vec{}) +
             choose(y == high, splat(s.at_high), Vec{})) /
            range(r);
    if constexpr (__is_same(W, StickBreaking)) dx = d_stick(y, p.w * dw, d_before);
    store(dp + j, choose(y >= splat(f.clamp), Vec{}, dx));
    store(x + j, f.decay ? p.w * k.decay_factor(i, j) : p.w);
    if (!f.decay) continue;
    const Vec d = (p.w - p.less) * dw;
    for (int l = 0; l < kWidth && k.s0 + j + l < f.S; ++l)
      d_decay += d[l], d_decay_key[k.key(j + l)] -= d[l];
  }
  if (f.centred) centre(k, i, dp);
  if (f.decay) f.d_decay_query[row] = d_decay;
  if (r.beta == 1 && f.softcap == 0 && !f.d_bias) return;
  for (int64_t j = 0; j < k.width; j += kWidth) {
    const Vec dx = load(dp + j), through = f.softcap != 0 ? load(cap_slopes + j) : splat(1);
    if (f.d_bias) k.add_d_bias(i, j, dx);
    store(dp + j, dx * r.beta * through);
  }
}

template <class W>
static void backward(const W& w, const Block& k, float* x, float* dp, int64_t part) {
  const Rows& f = k.f;
  const float *q = f.scaled + k.row(0) * f.D, *dN = f.dN + k.row(0) * f.E;
  products(k, f.q + k.row(0) * f.D, f.D, f.k_tiles, x);
  products(k, dN, f.E, f.v_tiles, dp);
  const int64_t keys = part * f.B * f.G * f.S;  // offset of this part in dk and dv
  for (int i = 0; i < k.rows; ++i) {
    drop(k, i, dp + i * f.stride);
    slopes(w, k, i, x + i * f.stride, dp + i * f.stride, f.decay ? f.d_decay_key + keys : nullptr,
           dp + kStrip * f.stride);
    drop(k, i, x + i * f.stride);
  }
  const int D = int(f.D), E = int(f.E);
  float* dq = f.dq + k.row(0) * D;
  for (int64_t j = 0; j < k.width; j += kTile) {
    const int columns = k.columns(j);
    float *dk = f.dk + (keys + k.key(j)) * D, *dv = f.dv + (keys + k.key(j)) * E;
    multiply<true>({x + j, 1, f.stride, dN, E, dv, E, columns, E, k.rows});
    multiply<true>({dp + j, 1, f.stride, q, D, dk, D, columns, D, k.rows});
    multiply<true>({dp + j, f.stride, 1, f.k + k.key(j) * D, D, dq, D, k.rows, D, columns});
  }
}

static void forward_task(const Rows& f, int64_t task, float* scratch) {
  const int64_t n = (f.T + kStrip - 1) / kStrip;
  const Block block(f, task / n, n - 1 - task % n);  // longest rows first
  std::visit([&](const auto& w) { forward(w, block, scratch, scratch + kStrip * f.stride); },
             f.weight);
}

// Every parts-th block of queries, for the query heads of one key head.
static void backward_task(const Rows& f, int64_t task, float* scratch) {
  const int64_t part = task % f.parts, key_head = task / f.parts, each = f.H / f.G;
  for (int64_t r = 0; r < each; ++r)
    for (int64_t i = part; i * kStrip < f.T; i += f.parts) {
      const Block block(f, key_head * each + r, i);
      std::visit(
          [&](const auto& w) { backward(w, block, scratch, scratch + kStrip * f.stride, part); },
          f.weight);
    }
}

const RowKernels row_kernels{forward_task, backward_task};

}  // namespace horner::attn::kernels::HORNER_ISA

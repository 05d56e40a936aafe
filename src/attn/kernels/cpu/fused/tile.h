// From the products of a tile to its weights and score gradients, for every dtype.
#pragma once

#include "attn/kernels/cpu/dropout.h"
#include "attn/kernels/cpu/fused/epilogue.h"
#include "attn/kernels/cpu/fused/fused.h"
#include "attn/kernels/cpu/fused/statistics.h"

namespace horner::attn::kernels::HORNER_ISA {

static constexpr int kVecs = kTile / kWidth;

typedef double VecSums __attribute__((vector_size(kWidth * 8)));  // kWidth sums in double
typedef VecSums VecSumsLoose __attribute__((aligned(8), may_alias));

static int least(int64_t a, int64_t b) {
  return int(a < b ? a : b);
}

// A tile of weights: queries from t0 of one head, keys from s0 of its key head.
struct Tile {
  const Fused& f;
  int64_t b, h, g;  // batch, head, key head
  int64_t t0, s0;
  int rows, columns;
  float scale = f.softcap != 0 ? 1 : f.scale;  // of the products, capped if they are
  const float* bias = nullptr;  // [T, S] of this head, or null where the scores already have it

  int64_t row(int i) const { return (b * f.H + h) * f.T + t0 + i; }
  int64_t key(int j) const { return (b * f.G + g) * f.S + s0 + j; }
  int64_t key_block() const { return (b * f.G + g) * blocks(f.S) + s0 / kTile; }
  int64_t query_block() const { return (b * f.H + h) * blocks(f.T) + t0 / kTile; }
  int lo(int i) const { return f.seen.lo[t0 + i]; }
  int hi(int i) const { return f.seen.hi[b * f.seen.per_batch + t0 + i]; }
  int first_key(int i) const { return f.seen.from ? f.seen.from[t0 + i] : lo(i); }
  // Whether some query of the tile does not see some key of it.
  bool partial() const {
    const int64_t end = s0 + columns;
    if (f.keep || columns < kTile) return true;
    if (f.seen.from && f.seen.from[t0 + rows - 1] <= s0 && f.seen.to[t0] >= end) return false;
    return lo(rows - 1) > s0 || hi(0) < end;
  }
  // Whether a score is just a scaled product, possibly clamped.
  bool plain() const { return scale > 0 && !f.centre && !f.decay; }
  // Which of the kWidth keys from j query i sees.
  VecInt seen(int i, int j) const {
    const VecInt s = lanes(int(s0) + j);
    VecInt yes = (s >= lo(i)) & (s < hi(i));
    if (f.seen.from) yes |= (s >= f.seen.from[t0 + i]) & (s < f.seen.to[t0 + i]);
    if (f.keep) {
      VecInt kept{};
      for (int l = 0; l < kWidth && s0 + j + l < f.S; ++l)
        kept[l] = -(f.keep[b * f.S + s0 + j + l] != 0);
      yes &= kept;
    }
    return yes;
  }
  // Which of the kWidth keys from j are among the newest of query i.
  VecInt is_near(int i, int j) const {
    return lanes(int(s0) + j) > int(t0 + i + f.S - f.T - f.near);
  }
  // This head's part of the bias, or of its gradient.
  template <class F>
  F* of_head(F* all) const {
    return all ? all + b * f.bias_batch + h * f.bias_head : nullptr;
  }
  // kWidth numbers from j of row i of such a part; 0 beyond the last key.
  Vec pairs(const float* part, int i, int j) const {
    const float* at = part + (t0 + i) * f.S + s0 + j;
    if (j + kWidth <= columns) return load(at);
    Vec y{};
    for (int l = 0; l < columns - j; ++l) y[l] = at[l];
    return y;
  }
  void add_pairs(Vec x, float* part, int i, int j) const {
    float* at = part + (t0 + i) * f.S + s0 + j;
    if (j + kWidth <= columns) return store(at, load(at) + x);
    for (int l = 0; l < columns - j; ++l) at[l] += x[l];
  }
  // The scores of kWidth keys from j, from the products x.
  Vec score(const float* x, int i, int j) const {
    Vec y = load(x + i * kTile + j) * scale;
    if (bias) y += pairs(bias, i, j);
    if (f.centre) y -= f.centre[row(i)];
    return min(splat(f.clamp), y);
  }
  // The log of the decay factor, the sum of log gates in (s, t], for kWidth keys from j; 0 where
  // the query does not see the key.
  template <bool Partial>
  Vec log_decay(int i, int j) const {
    const double* gate = f.decay + (b * f.G + g) * f.S;
    const double query =
        f.query_decay ? f.query_decay[(b * f.G + g) * f.T + t0 + i] : gate[query_position(i)];
    Vec x{};
    if (j + kWidth <= columns)
      x = __builtin_convertvector(query - *reinterpret_cast<const VecSumsLoose*>(gate + s0 + j),
                                  Vec);
    else
      for (int l = 0; l < columns - j; ++l) x[l] = float(query - gate[s0 + j + l]);
    const Vec y = choose(x < float(kNoDecayLeft), splat(-INFINITY), x);
    return Partial ? choose(seen(i, j), y, Vec{}) : y;
  }
  int64_t query_position(int i) const {
    const int64_t p = t0 + i + f.S - f.T;
    return p > 0 ? p : 0;
  }
};

// Caps the products.
static void cap(const Tile& tile, float* x) {
  const float cap = tile.f.softcap, to_unit = tile.f.scale / cap;
  for (int i = 0; i < tile.rows * kTile; i += kWidth)
    store(x + i, tanh(load(x + i) * to_unit) * cap);
}

// Forward.

// Adds the bias to the products, which are then scores: the simplest tiles stay simple.
static void add_bias(const Tile& tile, float* x) {
  const float* bias = tile.of_head(tile.f.bias);
  for (int i = 0; i < tile.rows; ++i)
    for (int j = 0; j < kTile; j += kWidth) {
      float* const at = x + i * kTile + j;
      store(at, load(at) * tile.scale + tile.pairs(bias, i, j));
    }
}

struct Sums {
  float N[kTile * kMostChannels];  // [rows, E]
  Vec W[kTile];                    // lane l sums every kWidth-th key, from l
  float shift[kTile];
  // RowStatistics as a struct of arrays, which suits the caches.
  Vec total[kTile], most[kTile], moment[kTile];
  float first[kTile];
};

// Raises the running maximum of row i and rescales its sums.
static void raise(float new_max, const Fused& f, int i, Sums& sums) {
  const float before = sums.shift[i];
  if (!(new_max > before)) return;
  sums.shift[i] = new_max;
  if (before == -INFINITY) return;
  const float keep = exp(splat(before - new_max))[0];
  if (f.statistics) {
    const Vec logs = f.near ? sums.total[i] * 1.44269504f : sums.W[i];  // of statistics.h
    sums.moment[i] = keep * (sums.moment[i] - (new_max - before) * logs);
    sums.most[i] *= keep, sums.first[i] *= keep, sums.total[i] *= keep;
  }
  sums.W[i] *= keep;
  for (int64_t e = 0; e < f.E; e += kWidth)
    store(sums.N + i * f.E + e, load(sums.N + i * f.E + e) * keep);
}

// From the products of row i to its weights, in place. Adds the weights to W, and for exp to the
// statistics: there the weights are positive and their logs are known.
template <bool Partial, bool Statistics, class W>
static void weigh_row(const W& w, const Tile& tile, int i, float* x, Sums& sums) {
  constexpr bool is_exp = __is_same(W, Exp);
  if constexpr (is_exp) {
    Vec top = splat(-INFINITY);
    for (int j = 0; j < kTile; j += kWidth) {
      Vec y = tile.score(x, i, j);
      if (tile.f.decay) y += tile.log_decay<Partial>(i, j);  // so that the largest weight is 1
      if constexpr (Partial) y = choose(tile.seen(i, j), y, splat(-INFINITY));
      top = max(top, y);
      store(x + i * kTile + j, y);
    }
    raise(largest(top), tile.f, i, sums);
  }
  const Vec shift = splat(is_exp && sums.shift[i] > -INFINITY ? sums.shift[i] : 0);
  Vec total{}, moment{}, most{};
  for (int j = 0; j < kTile; j += kWidth) {
    Vec y, log_y{};
    if constexpr (is_exp) {
      log_y = load(x + i * kTile + j) - shift;
      y = exp(log_y);
    } else {
      y = weight(w, tile.score(x, i, j)).w;
      if constexpr (Partial) y = choose(tile.seen(i, j), y, Vec{});
    }
    if (!is_exp && tile.f.decay) y *= exp(tile.log_decay<Partial>(i, j));
    store(x + i * kTile + j, y);
    total += y;
    if constexpr (Statistics) {
      moment += y * max(splat(-1000), log_y);  // 0 where masked: y = 0
      most = max(most, y);
    }
  }
  if constexpr (Statistics) {
    sums.moment[i] += moment;
    sums.most[i] = max(sums.most[i], most);
  }
  sums.W[i] += total;
}

// The same for the simplest tiles: exp of a scaled product, with every key seen. Scores that are
// large or not finite take weigh_row, which rounds a score before it subtracts the largest.
template <bool Statistics, bool Clamped>
static void weigh_plain(const Tile& tile, float* x, Sums& sums) {
  constexpr float kLarge = 4096;
  const float clamp = tile.f.clamp;
  for (int i = 0; i < tile.rows; ++i) {
    float* row = x + i * kTile;
    Vec top = load(row);
    for (int j = kWidth; j < kTile; j += kWidth) top = max(top, load(row + j));
    const float most = largest(top) * tile.scale;
    raise(Clamped && most > clamp ? clamp : most, tile.f, i, sums);
    if (!(fabsf(sums.shift[i]) < kLarge)) {
      weigh_row<false, Statistics>(Exp{}, tile, i, x, sums);
      continue;
    }
    Vec total{}, moment{};
    for (int j = 0; j < kTile; j += kWidth) {
      Vec score = load(row + j) * tile.scale;
      if constexpr (Clamped) score = min(splat(clamp), score);
      const Vec log_y = score - sums.shift[i], y = exp_down(log_y);
      store(row + j, y);
      total += y;
      if constexpr (Statistics) moment += y * max(splat(-1000), log_y);
    }
    sums.W[i] += total;
    if constexpr (Statistics) sums.moment[i] += moment;
  }
}

// The same where the near keys have exp and the others a polynomial, both times e^-shift: the
// largest near score with its decay, and not below 0 where there are others.
static void weigh_near(const Polynomial& w, const Tile& tile, float* x, Sums& sums) {
  const int64_t p0 = tile.t0 + tile.f.S - tile.f.T;
  const bool any_near = tile.s0 + kTile > p0 - tile.f.near + 1;
  for (int i = 0; i < tile.rows; ++i) {
    float* row = x + i * kTile;
    Vec top = splat(-INFINITY);
    VecInt far{};
    for (int j = 0; j < kTile; j += kWidth) {
      const Vec y = tile.score(x, i, j);
      const VecInt seen = tile.seen(i, j), near = tile.is_near(i, j);
      const Vec decayed = tile.f.decay ? y + tile.log_decay<true>(i, j) : y;
      top = max(top, choose(seen & near, decayed, splat(-INFINITY)));
      far |= seen & ~near;
      store(row + j, y);
    }
    raise(largest(top), tile.f, i, sums);
    if (sum(__builtin_convertvector(far, Vec)) != 0) raise(0, tile.f, i, sums);
    const float shift = sums.shift[i] > -INFINITY ? sums.shift[i] : 0;
    const Vec left = exp(splat(-shift));
    Vec total{};
    for (int j = 0; j < kTile; j += kWidth) {
      const Vec score = load(row + j);
      const Vec decay = tile.f.decay ? tile.log_decay<true>(i, j) : Vec{};
      Vec y = weight(w, score).w * left;
      if (tile.f.decay) y *= exp(decay);
      if (any_near) y = choose(tile.is_near(i, j), exp(score + decay - shift), y);
      y = choose(tile.seen(i, j), y, Vec{});
      store(row + j, y);
      total += y;
    }
    sums.W[i] += total;
  }
}

template <bool Partial, bool Statistics, class W>
static void weigh(const W& w, const Tile& tile, float* x, Sums& sums) {
  if constexpr (__is_same(W, Polynomial))
    if (tile.f.near) return weigh_near(w, tile, x, sums);
  if (__is_same(W, Exp) && !Partial && tile.plain())
    return tile.f.clamp == INFINITY ? weigh_plain<Statistics, false>(tile, x, sums)
                                    : weigh_plain<Statistics, true>(tile, x, sums);
  for (int i = 0; i < tile.rows; ++i) weigh_row<Partial, Statistics>(w, tile, i, x, sums);
}

template <bool Positive>
static void add_statistics(const Tile& tile, const float* x, Sums& sums) {
  for (int i = 0; i < tile.rows; ++i) {
    RowStatistics t;
    for (int j = 0; j < kTile; j += kWidth) {
      const Vec w = load(x + i * kTile + j);
      Positive ? t.add_positive(w) : t.add(w);
    }
    if constexpr (!Positive) sums.total[i] += t.total;
    sums.most[i] = max(sums.most[i], t.most);
    sums.moment[i] += t.moment;
  }
}

template <class W>
static void weigh_tile(const W& w, const Tile& tile, float* x, Sums& sums) {
  const bool partial = tile.partial();
  if (!tile.f.statistics)
    return partial ? weigh<true, false>(w, tile, x, sums) : weigh<false, false>(w, tile, x, sums);
  if constexpr (__is_same(W, Exp)) {
    partial ? weigh<true, true>(w, tile, x, sums) : weigh<false, true>(w, tile, x, sums);
  } else {
    partial ? weigh<true, false>(w, tile, x, sums) : weigh<false, false>(w, tile, x, sums);
    positive(w) && !tile.f.near ? add_statistics<true>(tile, x, sums)
                                : add_statistics<false>(tile, x, sums);
  }
  if (tile.first_key(0) >= tile.s0 + tile.columns || tile.first_key(tile.rows - 1) < tile.s0)
    return;
  for (int i = 0; i < tile.rows; ++i) {  // the first key of each row, if it is in this tile
    const int64_t j = tile.first_key(i) - tile.s0;
    if (j >= 0 && j < tile.columns) sums.first[i] = fabsf(x[i * kTile + j]);
  }
}

static void write_statistics(const Tile& tile, const float* W, const Sums& sums) {
  const Fused& f = tile.f;
  const bool is_exp = std::holds_alternative<Exp>(f.weight);
  const bool all_positive =
      !f.near && std::visit([](const auto& w) { return positive(w); }, f.weight);
  for (int i = 0; i < tile.rows; i += kWidth) {
    RowStatistics rows[kWidth];
    for (int j = 0; j < kWidth; ++j)
      rows[j] = {
          all_positive ? sums.W[i + j] : sums.total[i + j],
          is_exp && !f.decay
              ? splat(1)
              : sums.most[i + j],  // the shift is the largest score, so the largest weight is 1
          sums.moment[i + j], sums.first[i + j]};
    write(rows, W + i, least(kWidth, tile.rows - i), is_exp, f.statistics + tile.row(i),
          f.B * f.H * f.T);
  }
}

// Drops pairs of a tile.
static void drop(const Tile& tile, float* x) {
  const Dropout& d = tile.f.dropout;
  for (int i = 0; i < tile.rows; ++i)
    drop(d, dropout_row(d.seed, tile.b, tile.h, tile.t0 + i), tile.s0, kTile, x + i * kTile);
}

// Multiplies the columns of a tile by the input gates of their values.
static void gate_values(const Tile& tile, float* x) {
  alignas(64) float gates[kTile] = {};
  for (int j = 0; j < tile.columns; ++j) gates[j] = tile.f.in_gate[tile.key(j)];
  for (int i = 0; i < tile.rows; ++i)
    for (int j = 0; j < kTile; j += kWidth)
      store(x + i * kTile + j, load(x + i * kTile + j) * load(gates + j));
}

// Backward.

// The gradient of a decay is a running sum of differences between rows and columns, in which most
// terms cancel: both are summed in double, from the same products.
static double total(VecSums x) {
  double all = 0;
  for (int i = 0; i < kWidth; ++i) all += x[i];
  return all;
}

// The weight and slope of kWidth scores from j of row i, times their decay and e^-shift.
template <class W>
static Slope<Vec> slope(const W& w, const Tile& tile, int i, int j, Vec score, Vec log_decay,
                        Vec shift) {
  if constexpr (__is_same(W, Exp)) {
    return weight(w, score + log_decay - shift);
  } else {
    const bool near = __is_same(W, Polynomial) && tile.f.near;
    Slope<Vec> y = weight(w, near ? score : score - shift);
    Vec factor = near ? exp(-shift) : splat(1);
    if (tile.f.decay) factor *= exp(log_decay);
    y = {y.w * factor, y.dw * factor};
    if (!near) return y;
    const Vec exact = exp(score + log_decay - shift);
    const VecInt newest = tile.is_near(i, j);
    return {choose(newest, exact, y.w), choose(newest, exact, y.dw)};
  }
}

// From products x, capped if they are, and dp = v.dN to the weights (in x) and the gradients of the
// products (in dp).
template <bool Partial, class W>
static void slopes(const W& w, const Tile& tile, float* x, float* dp) {
  const Fused& f = tile.f;
  VecSums d_key[kVecs] = {};
  float* const d_bias = tile.of_head(f.d_bias);
  for (int i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.row(i);
    const Vec shift = splat(f.shift[row]), dW = splat(f.dW[row]);
    const Vec clamp = splat(f.clamp < INFINITY ? f.clamp : NAN);  // then no score reaches it
    Vec d_centre{};
    VecSums d_decay{};
    for (int j = 0; j < kTile; j += kWidth) {
      const Vec score = tile.score(x, i, j);
      Vec through = splat(f.scale);
      if (f.softcap != 0) {
        const Vec share = load(x + i * kTile + j) / f.softcap;
        through *= 1 - share * share;
      }
      const Vec log_decay = f.decay ? tile.log_decay<Partial>(i, j) : Vec{};
      Slope<Vec> y = slope(w, tile, i, j, score, log_decay, shift);
      Vec dw = load(dp + i * kTile + j) + dW;
      if constexpr (Partial) {
        const VecInt seen = tile.seen(i, j);
        through = choose(seen, through, Vec{});
        y = {choose(seen, y.w, Vec{}), choose(seen, y.dw, Vec{})}, dw = choose(seen, dw, Vec{});
      }
      if (f.decay) {
        const Vec d = y.w * dw;
        d_decay += __builtin_convertvector(d, VecSums);
        d_key[j / kWidth] += __builtin_convertvector(d, VecSums);
      }
      const Vec dx = choose(score >= clamp, Vec{}, y.dw * dw);
      d_centre += dx;
      if (d_bias) tile.add_pairs(dx, d_bias, i, j);
      store(x + i * kTile + j, y.w);
      store(dp + i * kTile + j, dx * through);
    }
    if (f.d_centre) f.d_centre[row] -= sum(d_centre);
    if (f.decay) f.d_decay_query[row] += total(d_decay);
  }
  if (!f.decay) return;
  for (int j = 0; j < tile.columns; ++j)
    f.d_decay_key[tile.key(j)] -= d_key[j / kWidth][j % kWidth];
}

// Applies the input gates to dv, which holds u, and writes their gradients:
//   dv_s = in_s u_s,  d_in_s = v_s.u_s,  u_s = sum_t w_ts dN_t
template <class Value>
static void gate_d_values(const Tile& tile, const Value& value, float* dv) {
  const int64_t E = tile.f.E;
  for (int j = 0; j < tile.columns; ++j, dv += E) {
    const float in = tile.f.in_gate[tile.key(j)];
    Vec d_in{};
    for (int64_t e = 0; e < E; e += kWidth) {
      const Vec u = load(dv + e);
      d_in += u * value(j, e);
      store(dv + e, u * in);
    }
    tile.f.d_in_gate[tile.key(j)] = sum(d_in);
  }
}

// The queries that see some key of the tile; `first` is rounded down to a block.
struct Queries {
  int64_t first, last;
};
static Queries queries(const Tile& tile) {
  const SeenKeys& k = tile.f.seen;
  const int32_t* hi = k.hi + tile.b * k.per_batch;
  const int64_t s0 = tile.s0, s1 = s0 + tile.columns;
  int64_t a = 0, b = tile.f.T;
  const auto among_first = [&](int64_t t) { return k.from && k.from[t] < s1 && k.to[t] > s0; };
  while (a < b && hi[a] <= s0) ++a;
  while (b > a && k.lo[b - 1] >= s1 && !among_first(b - 1)) --b;
  return {a / kTile * kTile, b};
}

}  // namespace horner::attn::kernels::HORNER_ISA

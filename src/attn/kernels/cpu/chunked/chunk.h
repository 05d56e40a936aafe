// One chunk of tokens of one key head: its position, its decay factors, and attention inside it,
//   w_ts = weight(q_t.k_s - centre_t) * decay_ts * keep_s,  s <= t
// forward and backward.
#pragma once

#include <cmath>
#include <vector>

#include "attn/kernels/cpu/chunked/monomials.h"
#include "attn/kernels/cpu/chunked/scratch.h"

namespace horner::attn::kernels::HORNER_ISA {

template <class R>
struct Chunk {
  using V = VecOf<R>;
  static constexpr int kL = kLanes<R>;
  static constexpr int kGroup = 16;  // rows of the causal triangle processed together

  const Chunked<R>& c;
  int C, wide;
  // Buffers.
  R *kT, *vT, *qT, *dNT;             // [D, C], [E, C], [D, C], [E, C]
  R *w, *slope, *dw, *decay_factor;  // [C, C]
  R *share, *query;  // [C]: decay from a key to the end of the chunk; from its start to a query
  R *multiplier, *d_multiplier;  // [last + 1, C]
  R *N, *W;                      // [C, E], [C]
  R* y;                          // [C, E]
  R *levels, *dlevels, *block, *g, *dots, *dx;
  // The current chunk.
  int64_t b = 0, gh = 0, t0 = 0;  // batch, b * G + key head, first token
  int n = 0;
  R whole = 1;  // decay over the whole chunk

  Chunk(const Chunked<R>& c, Scratch<R>& s) : c(c), C(c.C), wide(int(c.width)) {
    kT = s.take(c.D * C), vT = s.take(c.E * C), qT = s.take(c.D * C), dNT = s.take(c.E * C);
    w = s.take(C * C), slope = s.take(C * C), dw = s.take(C * C);
    decay_factor = s.take(c.decay || c.keep ? C * C : 0);
    share = s.take(C), query = s.take(C);
    multiplier = s.take((c.last + 1) * C), d_multiplier = s.take((c.last + 1) * C);
    N = s.take(C * c.E), W = s.take(C), y = s.take(C * c.E);
    int64_t lower = c.F > 0;  // without features: one chunk and no state
    for (int p = 1; p < c.last && c.F > 0; ++p) lower += monomials(c.D, p);
    levels = s.take(lower * C), dlevels = s.take(lower * C);
    block = s.take(kBlock * C), g = s.take(kBlock * C);
    dots = s.take((c.last + 1) * C), dx = s.take(c.D * C);
  }

  const R* keys() const { return c.k + (gh * c.T + t0) * wide; }
  const R* values() const { return c.v + (gh * c.T + t0) * c.E; }
  int64_t row(int r) const {  // the first query of the r-th head that reads these keys
    return (gh * (c.H / c.G) + r) * c.T + t0;
  }
  bool kept(int i) const { return !c.keep || c.keep[b * c.T + t0 + i]; }
  double gate(int64_t t) const { return t < 0 ? 0 : c.decay[gh * c.T + t]; }

  // [n, ld] -> [channels, C], times a factor, padded with zeros.
  void transpose(const R* from, int64_t ld, int64_t channels, R* to, R factor = 1) const {
    for (int64_t d = 0; d < channels; ++d) {
      for (int i = 0; i < n; ++i) to[d * C + i] = from[i * ld + d] * factor;
      for (int i = n; i < C; ++i) to[d * C + i] = 0;
    }
  }
  // Makes tokens [first, first + count) of key head `head` the current chunk.
  void move(int64_t head, int64_t first, int count) {
    gh = head, b = head / c.G, t0 = first, n = count;
    const double end = c.decay ? gate(t0 + n - 1) : 0, before = c.decay ? gate(t0 - 1) : 0;
    whole = c.decay ? R(std::exp(end - before)) : R(1);
    for (int i = 0; i < C; ++i) {
      share[i] = i >= n || !kept(i) ? R(0) : c.decay ? R(std::exp(end - gate(t0 + i))) : R(1);
      query[i] = i >= n ? R(0) : c.decay ? R(std::exp(gate(t0 + i) - before)) : R(1);
    }
    transpose(keys(), wide, c.D, kT);
    for (int i = 0; c.keep && i < n; ++i)
      for (int64_t d = 0; d < c.D && !kept(i); ++d) kT[d * C + i] = 0;
    if (c.decay || c.keep) fill_decay();
  }
  // decay_ts * keep_s inside the chunk, 0 for s > t: products of the gates, row by row in double.
  void fill_decay() const {
    double left[kMostTokens];
    for (int i = 0; i < n; ++i) {
      const double gate_i = c.decay ? std::exp(gate(t0 + i) - gate(t0 + i - 1)) : 1;
      for (int s = 0; s < i; ++s) left[s] *= gate_i;
      left[i] = kept(i);
      for (int s = 0; s < C; ++s) decay_factor[i * C + s] = s <= i ? R(left[s]) : R(0);
    }
  }
  void decay_state(R* S, R* z) const {
    if (!c.decay) return;
    for (int64_t i = 0; i < c.F * c.E; ++i) S[i] *= whole;
    for (int64_t i = 0; i < c.F; ++i) z[i] *= whole;
  }

  Monomials<R> of_keys() const {
    return {int(c.D), c.first, c.last, C, true, kT, levels, block, nullptr};
  }
  // Multiplier of each order: e_N(x - b) = sum_n e_{N-n}(-b) x^n / n!, times the state's decay.
  Monomials<R> of_queries(int r) const {
    transpose(c.q + row(r) * wide, wide, c.D, qT, c.scale);
    const bool plain = !c.centre && !c.decay;
    if (!plain)
      for (int i = 0; i < C; ++i) {
        const R b = c.centre && i < n ? -c.centre[row(r) + i] : R(0);
        R e = 0, term = 1;  // e_{m-1}(b) and b^m / m!
        for (int m = 0; m <= c.last; ++m) {
          const int order = c.last - m;
          d_multiplier[order * C + i] = -e * query[i];
          e += term, term *= b / (m + 1);
          multiplier[order * C + i] = (c.centre ? e : R(1)) * query[i];
        }
      }
    return {int(c.D), c.first, c.last, C, false, qT, levels, block, plain ? nullptr : multiplier};
  }
  // The values, times the decay from each key to the end of the chunk.
  const R* shared_values() const {
    if (!c.decay && !c.keep) return values();
    for (int i = 0; i < n; ++i)
      for (int64_t e = 0; e < c.E; e += kL)
        store(y + i * c.E + e, kept(i) ? load(values() + i * c.E + e) * share[i] : V{});
    return y;
  }

  // The columns that kGroup queries from i0 see, rounded to whole vectors.
  int columns(int i0) const { return i0 + kGroup < C ? i0 + kGroup : C; }
  // Their weights and slopes, with decay and mask applied: rows of w and slope.
  void weigh(int r, int i0, bool slopes) const {
    const int rows = n - i0 < kGroup ? n - i0 : kGroup, cols = columns(i0);
    const R* q = c.q + (row(r) + i0) * wide;
    multiply<false>(ProductOf<R>{q, wide, 1, kT, C, w + i0 * C, C, rows, cols, int(c.D)});
    for (int i = i0; i < i0 + rows; ++i) {
      const R centre = c.centre ? c.centre[row(r) + i] : R(0);
      for (int s = 0; s < cols; s += kL) {
        const Slope<V> y = attn::weight(c.weight, V(load(w + i * C + s) * c.scale - centre));
        store(w + i * C + s, y.w);
        if (slopes) store(slope + i * C + s, y.dw);
      }
      hide(w + i * C, i, cols);
      if (slopes) hide(slope + i * C, i, cols);
    }
  }
  void hide(R* row, int i, int cols) const {
    for (int s = 0; (c.decay || c.keep) && s < cols; s += kL)
      store(row + s, load(row + s) * load(decay_factor + i * C + s));
    clear_hidden(row, i, cols);
  }
  // Sets, rather than multiplies by 0, what query i does not see: it may be NaN.
  void clear_hidden(R* row, int i, int cols) const {
    for (int s = i + !c.strict; s < cols; ++s) row[s] = 0;
    for (int s = 0; c.keep && s <= i; ++s)
      if (!kept(s)) row[s] = 0;
  }
  // N and W of the r-th head, from the keys inside the chunk.
  void inside(int r) const {
    for (int i0 = 0; i0 < n; i0 += kGroup) {
      const int rows = n - i0 < kGroup ? n - i0 : kGroup, cols = columns(i0);
      weigh(r, i0, false);
      multiply<false>(ProductOf<R>{w + i0 * C, C, 1, values(), c.E, N + i0 * c.E, c.E, rows,
                                   int(c.E), cols < n ? cols : n});
      for (int i = i0; i < i0 + rows; ++i) {
        V sum{};
        for (int s = 0; s < cols; s += kL) sum += load(w + i * C + s);
        W[i] = sum_lanes<R>(sum);
      }
    }
    for (int i = n; i < C; ++i) W[i] = 0;
  }
  // The delta rule inside the chunk, with N from the state before it: by groups of rows, the ones
  // of a group after another.
  void solve() const {
    R *rest = c.rest + (gh * c.T + t0) * c.E, *u = c.corrected + (gh * c.T + t0) * c.E;
    for (int i0 = 0; i0 < n; i0 += kGroup) {
      const int rows = n - i0 < kGroup ? n - i0 : kGroup, E = int(c.E);
      weigh(0, i0, false);
      multiply<true>(ProductOf<R>{w + i0 * C, C, 1, u, E, N + i0 * E, E, rows, E, i0});
      for (int i = i0; i < i0 + rows; ++i) {
        const R share = c.share[gh * c.T + t0 + i];
        for (int e = 0; e < E; e += kL) {
          V sum = load(N + i * E + e);
          for (int s = i0; s < i; ++s) sum += w[i * C + s] * load(u + s * E + e);
          const V left = load(rest + i * E + e) - sum;
          store(rest + i * E + e, left);
          store(u + i * E + e, share == 0 ? V{} : left * share);  // of a hidden key: not NaN
        }
      }
    }
  }
  // Writes dq; adds to dk and dv.
  void inside_backward(int r) const {
    const R* dN = c.dN + row(r) * c.E;
    R *dq = c.dq + row(r) * wide, *dk = c.dk + (gh * c.T + t0) * wide;
    R* dv = c.dv + (gh * c.T + t0) * c.E;
    for (int i0 = 0; i0 < n; i0 += kGroup) {
      const int rows = n - i0 < kGroup ? n - i0 : kGroup, cols = columns(i0);
      const int seen = cols < n ? cols : n, E = int(c.E);
      weigh(r, i0, true);
      R *wi = w + i0 * C, *dwi = dw + i0 * C;
      const R* q = c.q + (row(r) + i0) * wide;
      multiply<false>(ProductOf<R>{dN + i0 * E, E, 1, vT, C, dwi, C, rows, cols, E});
      for (int i = i0; i < i0 + rows; ++i) row_backward(r, i, cols);
      multiply<false>(
          ProductOf<R>{dwi, C, 1, keys(), wide, dq + i0 * wide, wide, rows, wide, seen});
      multiply<true>(ProductOf<R>{dwi, 1, C, q, wide, dk, wide, seen, wide, rows});
      multiply<true>(ProductOf<R>{wi, 1, C, dN + i0 * E, E, dv, E, seen, E, rows});
    }
  }
  // Replaces dw by the gradient of the products q.k.
  void row_backward(int r, int i, int cols) const {
    const R dW = c.dW[row(r) + i];
    R* d = dw + i * C;
    for (int s = 0; s < cols; s += kL) store(d + s, load(d + s) + dW);
    clear_hidden(d, i, cols);
    if (c.d_decay)
      for (int s = 0; s < i + 1; ++s) {
        const double flow = double(w[i * C + s]) * d[s];
        c.d_decay[gh * c.T + t0 + i] += flow, c.d_decay[gh * c.T + t0 + s] -= flow;
      }
    V sum{};
    for (int s = 0; s < cols; s += kL) {
      const V x = load(d + s) * load(slope + i * C + s);
      store(d + s, x * c.scale), sum += x;
    }
    if (c.d_centre) c.d_centre[row(r) + i] = -sum_lanes<R>(sum);
  }
};

// The first tokens of the chunks of a segment, then its end. A packed sequence begins a new chunk.
template <class R>
std::vector<int64_t> chunk_starts(const Chunked<R>& c, int64_t segment) {
  const int64_t from = segment * c.length, to = from + c.length < c.T ? from + c.length : c.T;
  std::vector<int64_t> starts{from};
  for (int64_t t = from + 1; t < to; ++t)
    if (t - starts.back() == c.C || (c.begins && c.begins[t])) starts.push_back(t);
  starts.push_back(to);
  return starts;
}

}  // namespace horner::attn::kernels::HORNER_ISA

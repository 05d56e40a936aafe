// All distinct monomials of degree `first` to `last` in D variables, for one chunk of tokens, and
// their products with a state:
//   (q.k)^n / n! = sum_{|a| = n} q^a k^a / a!
// Monomials of degree p are ordered by their last variable, so they are x_0, x_1, ... times longer
// and longer prefixes of the list of degree p - 1. If x_i then has power e, the factor is x_i / e,
// which gives 1/a!. Lanes are tokens: rows are [feature, token], without gathers.
#pragma once

#include "attn/kernels/cpu/chunked/chunked.h"
#include "attn/kernels/cpu/vectors.h"
#include "core/simd/gemm.h"

namespace horner::attn::kernels::HORNER_ISA {

inline constexpr int kBlock = 64;  // features in memory at a time

// Rows of degree p: x_i / e times `count` rows of degree p - 1, starting at `from`.
struct Run {
  int i, e;
  int64_t from;
  int count;
};

// Calls use(first row, rows, runs, number of runs) for each block of rows of degree p.
template <class F>
void for_each_block(int D, int p, const F& use) {
  Run runs[kBlock];
  int n = 0, rows = 0;
  int64_t first = 0;
  for (int i = 0; i < D; ++i) {
    int64_t from = 0;
    for (int e = 1; e <= p; ++e) {
      const int64_t count = monomials(i, p - e);
      for (int64_t done = 0; done < count;) {
        const int take = int(count - done < kBlock - rows ? count - done : kBlock - rows);
        runs[n++] = {i, e, from + done, take};
        rows += take, done += take;
        if (rows < kBlock) continue;
        use(first, rows, runs, n);
        first += rows, rows = n = 0;
      }
      from += count;
    }
  }
  if (rows > 0) use(first, rows, runs, n);
}

// The monomials of one chunk.
template <class R>
struct Monomials {
  using V = VecOf<R>;
  static constexpr int kL = kLanes<R>;

  int D, first, last, C;
  bool divided;         // by a!: for keys
  const R* x;           // [D, C]
  R* levels;            // degrees 0 to last - 1, concatenated, [.., C]
  R* block;             // [kBlock, C]
  const R* multiplier;  // [last + 1, C]: multiplies each order of each token, or null

  // The first row of degree p in a list that starts with degree `from`.
  int64_t begin(int from, int p) const {
    int64_t n = 0;
    for (int i = from; i < p; ++i) n += monomials(D, i);
    return n;
  }
  R* level(int p) const { return levels + begin(0, p) * C; }
  V factor(const Run& r, int c) const {
    return load(x + r.i * C + c) * (divided ? R(1) / r.e : R(1));
  }
  void rows(const Run* runs, int n, const R* previous, R* to) const {
    for (const Run* r = runs; r < runs + n; to += r++->count * C)
      for (int c = 0; c < C; c += kL) {
        const V f = factor(*r, c);
        const R* from = previous + r->from * C + c;
        R* at = to + c;
        for (int j = 0; j < r->count; ++j, from += C, at += C) store(at, load(from) * f);
      }
  }
  void expand() const {
    for (int c = 0; c < C; ++c) levels[c] = 1;
    for (int p = 1; p < last; ++p) {
      R* to = level(p);
      const R* from = level(p - 1);
      for_each_block(D, p, [&](int64_t row, int, const Run* runs, int n) {
        rows(runs, n, from, to + row * C);
      });
    }
  }
  // Calls use(order, first feature, rows, monomials [rows, C]).
  template <class F>
  void for_each(const F& use) const {
    int64_t at = 0;
    for (int p = first; p < last || p == 0; at += monomials(D, p++)) {
      const int64_t all = monomials(D, p);
      for (int64_t row = 0; row < all; row += kBlock)
        use(p, at + row, int(all - row < kBlock ? all - row : kBlock), level(p) + row * C);
    }
    if (last == 0) return;
    for_each_block(D, last, [&](int64_t row, int n, const Run* runs, int number) {
      rows(runs, number, level(last - 1), block);
      use(last, at + row, n, block);
    });
  }
  const R* multiplied(int order, const R* phi, int n) const {
    if (!multiplier) return phi;
    for (int i = 0; i < n; ++i)
      for (int c = 0; c < C; c += kL)
        store(block + i * C + c, load(phi + i * C + c) * load(multiplier + order * C + c));
    return block;
  }
};

template <class R>
R sum_lanes(VecOf<R> x) {
  R y = 0;
  for (int i = 0; i < kLanes<R>; ++i) y += x[i];
  return y;
}

// S_f += sum_t phi_f(x_t) y_t,  z_f += sum_t phi_f(x_t) share_t,  over n tokens of E channels.
template <class R>
struct Fold {
  const R* y;      // [n, E]
  const R* share;  // [C], 0 from n on
  int n;
  int64_t E;
  R *S, *z;  // [F, E], [F]
};
template <class R>
void fold(const Monomials<R>& m, const Fold<R>& f) {
  using V = VecOf<R>;
  m.for_each([&](int order, int64_t at, int rows, const R* plain) {
    const R* phi = m.multiplied(order, plain, rows);
    multiply<true>(ProductOf<R>{phi, m.C, 1, f.y, f.E, f.S + at * f.E, f.E, rows, int(f.E), f.n});
    for (int i = 0; i < rows; ++i) {
      V sum{};
      for (int c = 0; c < m.C; c += m.kL) sum += load(phi + i * m.C + c) * load(f.share + c);
      f.z[at + i] += sum_lanes<R>(sum);
    }
  });
}

// N_t += sum_f phi_f(x_t) S_f,  W_t += sum_f phi_f(x_t) z_f.
template <class R>
struct ApplyState {
  const R *S, *z;  // [F, E], [F]
  int n;
  int64_t E;
  R *N, *W;  // [n, E], [C]
};
template <class R>
void apply_state(const Monomials<R>& m, const ApplyState<R>& a) {
  using V = VecOf<R>;
  m.for_each([&](int order, int64_t at, int rows, const R* plain) {
    const R* phi = m.multiplied(order, plain, rows);
    multiply<true>(ProductOf<R>{phi, 1, m.C, a.S + at * a.E, a.E, a.N, a.E, a.n, int(a.E), rows});
    for (int c = 0; c < m.C; c += m.kL) {
      V sum{};
      for (int i = 0; i < rows; ++i) sum += load(phi + i * m.C + c) * a.z[at + i];
      store(a.W + c, load(a.W + c) + sum);
    }
  });
}

// The gradient of a monomial is g_f = S_f.dN_t + z_f dW_t. Adds dx, and per order sum_f phi_f g_f.
template <class R>
struct ApplyStateBackward {
  const R *S, *z;    // [F, E], [F]
  const R *dN, *dW;  // [E, C], [C]
  int64_t E;
  R* dx;       // [D, C], added to
  R* dots;     // [last + 1, C], added to
  R* dlevels;  // same layout as the levels
  R* g;        // [kBlock, C]
};
template <class R>
void add_rows(const ApplyStateBackward<R>& b, const Monomials<R>& m, int64_t at, int rows, R* g) {
  using V = VecOf<R>;
  multiply<false>(ProductOf<R>{b.S + at * b.E, b.E, 1, b.dN, m.C, g, m.C, rows, m.C, int(b.E)});
  for (int i = 0; i < rows; ++i) {
    const V z = splat(b.z[at + i]);
    for (int c = 0; c < m.C; c += m.kL)
      store(g + i * m.C + c, load(g + i * m.C + c) + z * load(b.dW + c));
  }
}
// Propagates the gradients g of one run of rows of degree p to degree p - 1 and to x_i. `top` is
// the order whose dots and multiplier are still to be applied, -1 for none.
template <class R>
void run_backward(const ApplyStateBackward<R>& b, const Monomials<R>& m, const Run& r, int p,
                  int top, const R* g) {
  using V = VecOf<R>;
  const R* previous = m.level(p - 1) + r.from * m.C;
  R* d_previous = b.dlevels + (m.begin(0, p - 1) + r.from) * m.C;
  for (int c = 0; c < m.C; c += m.kL) {
    const V f = m.factor(r, c), share = splat(m.divided ? R(1) / r.e : R(1));
    const V order = top >= 0 && m.multiplier ? load(m.multiplier + top * m.C + c) : splat(R(1));
    V d{};
    for (int j = 0; j < r.count; ++j) {
      const V gradient = load(g + j * m.C + c);
      d += gradient * load(previous + j * m.C + c);
      store(d_previous + j * m.C + c, load(d_previous + j * m.C + c) + gradient * f * order);
    }
    store(b.dx + r.i * m.C + c, load(b.dx + r.i * m.C + c) + d * share * order);
    if (top >= 0) store(b.dots + top * m.C + c, load(b.dots + top * m.C + c) + d * f);
  }
}
template <class R>
void apply_state_backward(const Monomials<R>& m, const ApplyStateBackward<R>& b) {
  using V = VecOf<R>;
  const int C = m.C;
  const int64_t lower = m.begin(0, m.last > 0 ? m.last : 1);
  for (int64_t i = 0; i < lower * C; ++i) b.dlevels[i] = 0;
  // The orders below the highest, whose rows are all in memory.
  int64_t at = 0;
  for (int p = m.first; p < m.last || p == 0; at += monomials(m.D, p++)) {
    const int64_t all = monomials(m.D, p);
    const R* phi = m.level(p);
    R* to = b.dlevels + m.begin(0, p) * C;
    for (int64_t row = 0; row < all; row += kBlock) {
      const int rows = int(all - row < kBlock ? all - row : kBlock);
      add_rows(b, m, at + row, rows, to + row * C);
    }
    for (int c = 0; c < C; c += m.kL) {
      V dot{};
      const V order = m.multiplier ? load(m.multiplier + p * C + c) : splat(R(1));
      for (int64_t i = c; i < all * C; i += C) {
        const V g = load(to + i);
        dot += g * load(phi + i);
        store(to + i, g * order);
      }
      store(b.dots + p * C + c, load(b.dots + p * C + c) + dot);
    }
  }
  if (m.last == 0) return;
  for_each_block(m.D, m.last, [&](int64_t row, int rows, const Run* runs, int n) {
    add_rows(b, m, at + row, rows, b.g);
    const R* g = b.g;
    for (const Run* r = runs; r < runs + n; g += r++->count * C)
      run_backward(b, m, *r, m.last, m.last, g);
  });
  for (int p = m.last - 1; p > 0; --p)
    for_each_block(m.D, p, [&](int64_t row, int, const Run* runs, int n) {
      const R* g = b.dlevels + (m.begin(0, p) + row) * C;
      for (const Run* r = runs; r < runs + n; g += r++->count * C) run_backward(b, m, *r, p, -1, g);
    });
}

}  // namespace horner::attn::kernels::HORNER_ISA

// Compiled once per instruction set. A task processes the chunks of one key head in order.
#include "attn/kernels/cpu/channels/channels.h"

#include <cstring>
#include <vector>

#include "attn/kernels/cpu/chunked/scratch.h"
#include "attn/kernels/cpu/vectors.h"
#include "core/simd/gemm.h"

namespace horner::attn::kernels::HORNER_ISA {

template <class R>
struct Head {
  using V = VecOf<R>;
  static constexpr int kL = kLanes<R>, kC = kChannelTokens;

  const Channels<R>& c;
  int64_t gh, b;  // b * G + key head, batch
  int heads, wide, E;
  Scratch<R> scratch;
  R* keysT;    // [D, kC]: keys, with their decay up to the newest token; 0 for a hidden one
  R* rows;     // [kC, width]: keys or queries, with their decay up to the current token
  R* queries;  // [heads, kC, width]: scaled, with the decay since the start of the chunk
  R *x, *dx;   // [heads, kC, kC]
  R *u, *uT;   // [kC, E], [E, kC]: values, 0 for a hidden key
  R *N, *W;    // [kC, E], [kC]
  R* stateT;   // [E, width]: S or dS, transposed
  R *left, *tail, *gate;        // [width]
  std::vector<double> product;  // [width]: decay since the start of the chunk
  std::vector<int64_t> starts;  // of the chunks, then T
  // The current chunk.
  int64_t t0 = 0;
  int n = 0;

  Head(const Channels<R>& c, int64_t task, R* memory)
      : c(c),
        gh(task),
        b(task / c.G),
        heads(int(c.H / c.G)),
        wide(int(c.width)),
        E(int(c.E)),
        scratch{memory},
        product(size_t(c.width)) {
    keysT = scratch.take(c.D * kC), rows = scratch.take(kC * wide);
    queries = scratch.take(heads * kC * wide);
    x = scratch.take(heads * kC * kC), dx = scratch.take(heads * kC * kC);
    u = scratch.take(kC * E), uT = scratch.take(E * kC);
    N = scratch.take(kC * E), W = scratch.take(kC);
    stateT = scratch.take(E * wide);
    left = scratch.take(wide), tail = scratch.take(wide), gate = scratch.take(wide);
    if (!memory) return;
    for (int64_t t = 0; t < c.T; ++t)
      if (starts.empty() || t - starts.back() == kC || (c.begins && c.begins[t]))
        starts.push_back(t);
    starts.push_back(c.T);
  }

  int chunks() const { return int(starts.size()) - 1; }
  void move(int i) { t0 = starts[size_t(i)], n = int(starts[size_t(i) + 1] - t0); }
  bool begins(int i) const { return i > 0 && c.begins && c.begins[starts[size_t(i)]]; }
  bool kept(int i) const { return !c.keep || c.keep[b * c.T + t0 + i]; }
  int64_t token(int i) const { return gh * c.T + t0 + i; }
  int64_t row(int r, int i) const { return (gh * heads + r) * c.T + t0 + i; }
  int seen(int i) const { return i + !c.strict; }  // the keys of the chunk that query i sees
  R* S() const { return c.S + gh * c.D * E; }
  R* z() const { return c.z + gh * c.D; }
  R* dS() const { return c.dS + gh * c.D * E; }
  R* dz() const { return c.dz + gh * c.D; }
  void clear(R* S, R* z) const {
    std::memset(S, 0, sizeof(R) * size_t(c.D * E)), std::memset(z, 0, sizeof(R) * size_t(c.D));
  }
  void load_gate(int i) const {
    for (int d = 0; d < wide; ++d) gate[d] = R(c.gates[token(i) * wide + d]);
  }
  void transpose(const R* S) const {
    for (int e = 0; e < E; ++e) {
      for (int d = 0; d < int(c.D); ++d) stateT[e * wide + d] = S[d * E + e];
      for (int d = int(c.D); d < wide; ++d) stateT[e * wide + d] = 0;
    }
  }
  void load_values() const {
    for (int i = 0; i < n; ++i)
      for (int e = 0; e < E; e += kL)
        store(u + i * E + e, kept(i) ? load(c.v + token(i) * E + e) : V{});
  }
  void multiply_rows(int from, int to, const R* by) const {
    for (int s = from; s < to; ++s)
      for (int d = 0; d < wide; d += kL)
        store(rows + s * wide + d, load(rows + s * wide + d) * load(by + d));
  }

  // x, `queries`, keysT at the end of the chunk and the decay of the whole of it.
  void scores() {
    std::memset(keysT, 0, sizeof(R) * size_t(c.D * kC));
    product.assign(size_t(wide), 1);
    for (int i = 0; i < n; ++i) {
      load_gate(i);
      const R* k = c.k + token(i) * wide;
      for (int d = 0; d < wide; ++d) product[size_t(d)] *= c.gates[token(i) * wide + d];
      for (int d = 0; d < wide; ++d) left[d] = R(product[size_t(d)]);
      for (int64_t d = 0; d < c.D; ++d) {
        for (int s = 0; s < kC; s += kL)
          store(keysT + d * kC + s, load(keysT + d * kC + s) * gate[d]);
        if (kept(i)) keysT[d * kC + i] = k[d];
      }
      for (int r = 0; r < heads; ++r) {
        const R* q = c.q + row(r, i) * wide;
        R *to = x + (r * kC + i) * kC, *query = queries + (r * kC + i) * wide;
        for (int s = 0; s < kC; s += kL) {
          V sum{};
          for (int64_t d = 0; d < c.D; ++d) sum += q[d] * load(keysT + d * kC + s);
          store(to + s, sum * c.scale);
        }
        for (int s = seen(i); s < kC; ++s) to[s] = 0;
        for (int s = 0; c.keep && s < seen(i); ++s)
          if (!kept(s)) to[s] = 0;  // NaN times 0
        for (int d = 0; d < wide; d += kL) store(query + d, load(q + d) * load(left + d) * c.scale);
      }
    }
  }
  void decay_state(R* S, R* z) const {
    for (int64_t d = 0; d < c.D; ++d) {
      const R by = R(product[size_t(d)]);
      for (int e = 0; e < E; e += kL) store(S + d * E + e, load(S + d * E + e) * by);
      z[d] *= by;
    }
  }
  // The state after the chunk; `values` are 0 for a hidden key.
  void update(const R* values) const {
    decay_state(S(), z());
    multiply<true>(ProductOf<R>{keysT, kC, 1, values, E, S(), E, int(c.D), E, n});
    for (int64_t d = 0; d < c.D; ++d)
      for (int s = 0; s < n; ++s) z()[d] += keysT[d * kC + s];
  }

  void forward() {
    for (int i = 0; i < chunks(); ++i) {
      if (begins(i)) clear(S(), z());
      move(i);
      scores();
      load_values();
      for (int r = 0; r < heads; ++r) {
        const R *to = x + r * kC * kC, *query = queries + r * kC * wide;
        R* N = c.N + row(r, 0) * E;
        multiply<false>(ProductOf<R>{to, kC, 1, u, E, N, E, n, E, n});
        multiply<true>(ProductOf<R>{query, wide, 1, S(), E, N, E, n, E, int(c.D)});
        for (int t = 0; t < n; ++t) {
          R sum = 0;
          for (int s = 0; s < seen(t); ++s) sum += to[t * kC + s];
          for (int64_t d = 0; d < c.D; ++d) sum += query[t * wide + d] * z()[d];
          c.W[row(r, t)] = sum;
        }
      }
      update(u);
    }
  }

  void solve() {
    for (int i = 0; i < chunks(); ++i) {
      if (begins(i)) clear(S(), z());
      move(i);
      scores();
      multiply<false>(ProductOf<R>{queries, wide, 1, S(), E, N, E, n, E, int(c.D)});
      R *rest = c.rest + token(0) * E, *to = c.corrected + token(0) * E;
      for (int t = 0; t < n; ++t) {
        const R share = c.share[token(t)];
        for (int e = 0; e < E; e += kL) {
          V sum = load(N + t * E + e);
          for (int s = 0; s < t; ++s) sum += x[t * kC + s] * load(to + s * E + e);
          const V own = load(rest + t * E + e) - sum;
          store(rest + t * E + e, own);
          store(to + t * E + e, share == 0 ? V{} : own * share);
        }
      }
      update(to);
    }
  }

  // dx of the current chunk: dN.v + dW, 0 for what is not seen.
  void score_gradients() const {
    for (int e = 0; e < E; ++e) {
      for (int s = 0; s < n; ++s) uT[e * kC + s] = u[s * E + e];
      for (int s = n; s < kC; ++s) uT[e * kC + s] = 0;
    }
    for (int r = 0; r < heads; ++r) {
      R* to = dx + r * kC * kC;
      multiply<false>(ProductOf<R>{c.dN + row(r, 0) * E, E, 1, uT, kC, to, kC, n, kC, E});
      for (int t = 0; t < n; ++t)
        for (int s = 0; s < kC; ++s)
          to[t * kC + s] = s < seen(t) && kept(s) ? to[t * kC + s] + c.dW[row(r, t)] : R(0);
    }
  }
  // dq of the current chunk from its keys and from the state before it.
  void queries_backward() {
    transpose(S());
    for (int r = 0; r < heads; ++r) {
      R* to = queries + r * kC * wide;
      multiply<false>(ProductOf<R>{c.dN + row(r, 0) * E, E, 1, stateT, wide, to, wide, n, wide, E});
      for (int t = 0; t < n; ++t)
        for (int64_t d = 0; d < c.D; ++d) to[t * wide + d] += c.dW[row(r, t)] * z()[d];
    }
    product.assign(size_t(wide), 1);
    for (int i = 0; i < n; ++i) {
      load_gate(i);
      multiply_rows(0, i, gate);
      for (int d = 0; d < wide; ++d) {
        product[size_t(d)] *= c.gates[token(i) * wide + d];
        left[d] = R(product[size_t(d)]);
        rows[i * wide + d] = kept(i) ? c.k[token(i) * wide + d] : R(0);
      }
      for (int r = 0; r < heads; ++r) {
        const R *from = dx + (r * kC + i) * kC, *state = queries + (r * kC + i) * wide;
        for (int d = 0; d < wide; d += kL) {
          V sum = load(state + d) * load(left + d);
          for (int s = 0; s < seen(i); ++s) sum += from[s] * load(rows + s * wide + d);
          store(c.dq + row(r, i) * wide + d, sum * c.scale);
        }
      }
    }
    for (int64_t d = 0; d < c.D; ++d)
      for (int s = 0; s < kC; ++s) keysT[d * kC + s] = s < n ? rows[s * wide + d] : R(0);
  }
  // dk and dv of the current chunk from its queries and from the gradient of the state after it.
  void keys_backward() {
    R* dv = c.dv + token(0) * E;
    multiply<false>(ProductOf<R>{keysT, 1, kC, dS(), E, dv, E, n, E, int(c.D)});
    for (int r = 0; r < heads; ++r)
      multiply<true>(ProductOf<R>{x + r * kC * kC, 1, kC, c.dN + row(r, 0) * E, E, dv, E, n, E, n});
    R* dk = c.dk + token(0) * wide;
    transpose(dS());
    multiply<false>(ProductOf<R>{u, E, 1, stateT, wide, dk, wide, n, wide, E});
    for (int d = 0; d < wide; ++d) tail[d] = 1;
    for (int s = n - 1; s >= 0; --s) {
      for (int64_t d = 0; d < c.D; ++d)
        dk[s * wide + d] = kept(s) ? (dk[s * wide + d] + dz()[d]) * tail[d] : R(0);
      load_gate(s);
      for (int d = 0; d < wide; d += kL) store(tail + d, load(tail + d) * load(gate + d));
    }
    for (int r = 0; r < heads; ++r)
      for (int s = n - 1; s >= 0; --s) {
        R* to = dk + s * wide;
        const R* q = c.q + row(r, s) * wide;
        for (int d = 0; d < wide; d += kL) store(rows + s * wide + d, load(q + d) * c.scale);
        for (int t = s + c.strict; t < n && kept(s); ++t) {
          const R by = dx[(r * kC + t) * kC + s];
          for (int d = 0; d < wide; d += kL)
            store(to + d, load(to + d) + by * load(rows + t * wide + d));
        }
        load_gate(s);
        multiply_rows(s, n, gate);
      }
    for (int s = 0; s < n; ++s)
      if (!kept(s)) std::memset(dv + s * E, 0, sizeof(R) * size_t(E));
  }
  // Adds the gradients of the queries of the current chunk to that of the state before it.
  void to_state() const {
    decay_state(dS(), dz());
    for (int r = 0; r < heads; ++r) {
      const R* query = queries + r * kC * wide;
      multiply<true>(
          ProductOf<R>{query, 1, wide, c.dN + row(r, 0) * E, E, dS(), E, int(c.D), E, n});
      for (int64_t d = 0; d < c.D; ++d)
        for (int t = 0; t < n; ++t) dz()[d] += query[t * wide + d] * c.dW[row(r, t)];
    }
  }
  void backward() {
    for (int i = 0; i < chunks(); ++i) {
      if (begins(i)) clear(S(), z());
      move(i);
      load_values();
      score_gradients();
      queries_backward();
      update(u);
    }
    for (int i = chunks() - 1; i >= 0; --i) {
      move(i);
      scores();
      load_values();
      score_gradients();
      keys_backward();
      to_state();
      if (begins(i)) clear(dS(), dz());
    }
  }
};

template <class R>
static int64_t scratch_size(const Channels<R>& c) {
  return Head<R>(c, 0, nullptr).scratch.used;
}
template <class R>
static void forward_task(const Channels<R>& c, int64_t task, R* scratch) {
  Head<R>(c, task, scratch).forward();
}
template <class R>
static void backward_task(const Channels<R>& c, int64_t task, R* scratch) {
  Head<R>(c, task, scratch).backward();
}
template <class R>
static void solve_task(const Channels<R>& c, int64_t task, R* scratch) {
  Head<R>(c, task, scratch).solve();
}

template <class R>
inline constexpr ChannelKernels<R> kKernels{scratch_size<R>, forward_task<R>, backward_task<R>,
                                            solve_task<R>};
const ChannelKernels<float> channels_float = kKernels<float>;
const ChannelKernels<double> channels_double = kKernels<double>;

}  // namespace horner::attn::kernels::HORNER_ISA

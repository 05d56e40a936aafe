// Compiled once per instruction set. A task processes the chunks of one segment in order, with its
// own state. Backward makes two passes: forward in time with S, for the gradients of the queries,
// and back in time with dS, for those of the keys and values.
#include "attn/kernels/cpu/chunked/chunked.h"

#include <cstring>

#include "attn/kernels/cpu/chunked/chunk.h"

namespace horner::attn::kernels::HORNER_ISA {

template <class R>
struct Task {
  const Chunked<R>& c;
  int64_t head, segment;  // b * G + key head
  Scratch<R> scratch;
  Chunk<R> chunk;
  std::vector<int64_t> starts;

  Task(const Chunked<R>& c, int64_t task, R* memory)
      : c(c),
        head(task / c.segments),
        segment(task % c.segments),
        scratch{memory},
        chunk(c, scratch),
        starts(chunk_starts(c, segment)) {}

  int chunks() const { return int(starts.size()) - 1; }
  void move(int i) { chunk.move(head, starts[i], int(starts[i + 1] - starts[i])); }
  bool begins(int i) const { return starts[i] > 0 && c.begins && c.begins[starts[i]]; }
  int heads() const { return int(c.H / c.G); }
  int64_t state(int64_t segment) const {
    return head * c.slots + (segment < c.slots ? segment : c.slots - 1);
  }
  R* at(R* S, int64_t segment) const { return S + state(segment) * c.F * c.E; }
  R* at_z(R* z, int64_t segment) const { return z + state(segment) * c.F; }

  void update(R* S, R* z) {
    chunk.decay_state(S, z);
    const Monomials<R> m = chunk.of_keys();
    m.expand();
    fold(m, Fold<R>{chunk.shared_values(), chunk.share, chunk.n, c.E, S, z});
  }
  void clear(R* S, R* z) const {
    if (c.F == 0) return;  // no state: no memory
    std::memset(S, 0, sizeof(R) * size_t(c.F * c.E)), std::memset(z, 0, sizeof(R) * size_t(c.F));
  }
  void copy(const R* S, const R* z, R* to, R* to_z) const {
    if (S == to || c.F == 0) return;
    std::memcpy(to, S, sizeof(R) * size_t(c.F * c.E));
    std::memcpy(to_z, z, sizeof(R) * size_t(c.F));
  }

  void sums(R* S, R* z) {
    clear(S, z);
    for (int i = 0; i < chunks(); ++i) {
      if (begins(i)) clear(S, z);
      move(i);
      update(S, z);
    }
  }

  void forward(R* S, R* z, bool keep_last) {
    bool empty = segment == 0 && !c.filled;
    for (int i = 0; i < chunks(); ++i) {
      if (begins(i)) clear(S, z), empty = true;
      move(i);
      for (int r = 0; r < heads(); ++r) {
        chunk.inside(r);
        if (!empty) {
          const Monomials<R> m = chunk.of_queries(r);
          m.expand();
          apply_state(m, ApplyState<R>{S, z, chunk.n, c.E, chunk.N, chunk.W});
        }
        std::memcpy(c.N + chunk.row(r) * c.E, chunk.N, sizeof(R) * size_t(chunk.n * c.E));
        std::memcpy(c.W + chunk.row(r), chunk.W, sizeof(R) * size_t(chunk.n));
      }
      if (keep_last || i + 1 < chunks()) update(S, z), empty = false;
    }
  }

  void solve(R* S, R* z) {
    bool empty = !c.filled;
    for (int i = 0; i < chunks(); ++i) {
      if (begins(i)) clear(S, z), empty = true;
      move(i);
      std::memset(chunk.N, 0, sizeof(R) * size_t(c.C * c.E));
      std::memset(chunk.W, 0, sizeof(R) * size_t(c.C));
      if (!empty) {
        const Monomials<R> m = chunk.of_queries(0);
        m.expand();
        apply_state(m, ApplyState<R>{S, z, chunk.n, c.E, chunk.N, chunk.W});
      }
      chunk.solve();
      if (i + 1 < chunks()) update(S, z), empty = false;
    }
  }

  // Adds the gradients of the queries of the current chunk to that of the state before it.
  void to_state(R* dS, R* dz) {
    chunk.decay_state(dS, dz);
    R* share = chunk.W;
    for (int r = 0; r < heads(); ++r) {
      const Monomials<R> m = chunk.of_queries(r);
      m.expand();
      for (int i = 0; i < c.C; ++i) share[i] = i < chunk.n ? c.dW[chunk.row(r) + i] : R(0);
      fold(m, Fold<R>{c.dN + chunk.row(r) * c.E, share, chunk.n, c.E, dS, dz});
    }
  }
  void backward_sums(R* dS, R* dz) {
    clear(dS, dz);
    for (int i = chunks() - 1; i >= 0; --i) {
      move(i);
      to_state(dS, dz);
      if (begins(i)) clear(dS, dz);
    }
  }

  // Adds columns [D, C] to rows [n, width].
  void add_transposed(const R* from, R* to, R factor = 1) const {
    for (int i = 0; i < chunk.n; ++i)
      for (int64_t d = 0; d < c.D; ++d) to[i * c.width + d] += from[d * c.C + i] * factor;
  }
  void clear_gradients() const {
    std::memset(chunk.dots, 0, sizeof(R) * size_t((c.last + 1) * c.C));
    std::memset(chunk.dx, 0, sizeof(R) * size_t(c.D * c.C));
  }
  void queries_backward(int r, const R* S, const R* z) {
    const Monomials<R> m = chunk.of_queries(r);
    m.expand();
    clear_gradients();
    R* dW = chunk.W;
    for (int i = 0; i < c.C; ++i) dW[i] = i < chunk.n ? c.dW[chunk.row(r) + i] : R(0);
    apply_state_backward(m, ApplyStateBackward<R>{S, z, chunk.dNT, dW, c.E, chunk.dx, chunk.dots,
                                                  chunk.dlevels, chunk.g});
    add_transposed(chunk.dx, c.dq + chunk.row(r) * c.width, c.scale);
    for (int order = c.first; order <= c.last; ++order)
      for (int i = 0; i < chunk.n; ++i) {
        const int at = order * c.C + i;
        if (c.d_centre) c.d_centre[chunk.row(r) + i] += chunk.d_multiplier[at] * chunk.dots[at];
        if (c.d_decay)
          c.d_decay[head * c.T + chunk.t0 + i] += double(chunk.multiplier[at]) * chunk.dots[at];
      }
  }
  void keys_backward(const R* dS, const R* dz) {
    const Monomials<R> m = chunk.of_keys();
    m.expand();
    clear_gradients();
    chunk.transpose(chunk.shared_values(), c.E, c.E, chunk.vT);
    apply_state_backward(m, ApplyStateBackward<R>{dS, dz, chunk.vT, chunk.share, c.E, chunk.dx,
                                                  chunk.dots, chunk.dlevels, chunk.g});
    const int64_t first = head * c.T + chunk.t0;
    add_transposed(chunk.dx, c.dk + first * c.width);
    if (c.d_decay)
      for (int order = c.first; order <= c.last; ++order)
        for (int i = 0; i < chunk.n; ++i) c.d_decay[first + i] -= chunk.dots[order * c.C + i];
    std::memset(chunk.N, 0, sizeof(R) * size_t(c.C * c.E));
    apply_state(m, ApplyState<R>{dS, dz, chunk.n, c.E, chunk.N, chunk.W});
    for (int i = 0; i < chunk.n; ++i)
      for (int64_t e = 0; e < c.E; ++e)
        c.dv[(first + i) * c.E + e] += chunk.share[i] * chunk.N[i * c.E + e];
  }
  void backward(R* S, R* z, R* dS, R* dz) {
    bool empty = segment == 0 && !c.filled;
    for (int i = 0; i < chunks(); ++i) {
      if (begins(i)) clear(S, z), empty = true;
      move(i);
      chunk.transpose(chunk.values(), c.E, c.E, chunk.vT);
      const int64_t first = head * c.T + chunk.t0;
      std::memset(c.dk + first * c.width, 0, sizeof(R) * size_t(chunk.n * c.width));
      std::memset(c.dv + first * c.E, 0, sizeof(R) * size_t(chunk.n * c.E));
      for (int r = 0; r < heads(); ++r) {
        chunk.transpose(c.dN + chunk.row(r) * c.E, c.E, c.E, chunk.dNT);
        chunk.inside_backward(r);
        if (!empty) queries_backward(r, S, z);
      }
      if (i + 1 < chunks()) update(S, z), empty = false;
    }
    bool nothing = segment + 1 == c.segments && !c.wanted;
    for (int i = chunks() - 1; i >= 0; --i) {
      move(i);
      if (!nothing) keys_backward(dS, dz);
      if (i > 0 || (segment == 0 && c.filled)) to_state(dS, dz), nothing = false;
      if (begins(i)) clear(dS, dz), nothing = true;
    }
  }
};

template <class R>
static int64_t scratch_size(const Chunked<R>& c) {
  Task<R> t(c, 0, nullptr);
  t.scratch.take(c.F * c.E), t.scratch.take(c.F);
  return t.scratch.used;
}

template <class R>
static void sums_task(const Chunked<R>& c, int64_t i, R* scratch) {
  Task<R> t(c, i, scratch);
  if (t.segment + 1 < c.segments) t.sums(t.at(c.S, t.segment + 1), t.at_z(c.z, t.segment + 1));
}

template <class R>
static void forward_task(const Chunked<R>& c, int64_t i, R* scratch) {
  Task<R> t(c, i, scratch);
  const bool last = t.segment + 1 == c.segments;
  R* S = last ? t.at(c.S, c.segments) : t.scratch.take(c.F * c.E);
  R* z = last ? t.at_z(c.z, c.segments) : t.scratch.take(c.F);
  t.copy(t.at(c.S, t.segment), t.at_z(c.z, t.segment), S, z);
  t.forward(S, z, last && c.wanted);
}

template <class R>
static void solve_task(const Chunked<R>& c, int64_t i, R* scratch) {
  Task<R> t(c, i, scratch);
  t.solve(t.at(c.S, 0), t.at_z(c.z, 0));
}

template <class R>
static void backward_sums_task(const Chunked<R>& c, int64_t i, R* scratch) {
  Task<R> t(c, i, scratch);
  if (t.segment > 0) t.backward_sums(t.at(c.dS, t.segment), t.at_z(c.dz, t.segment));
}

// Replaces the gradient of the state after a segment by that of the state before it.
template <class R>
static void backward_task(const Chunked<R>& c, int64_t i, R* scratch) {
  Task<R> t(c, i, scratch);
  R *S = t.scratch.take(c.F * c.E), *z = t.scratch.take(c.F);
  t.copy(t.at(c.S, t.segment), t.at_z(c.z, t.segment), S, z);
  t.backward(S, z, t.at(c.dS, t.segment + 1), t.at_z(c.dz, t.segment + 1));
}

// Whether the state survives a segment: no packed sequence begins in it.
template <class R>
static bool survives(const Chunked<R>& c, int64_t segment) {
  const int64_t from = segment * c.length, to = from + c.length < c.T ? from + c.length : c.T;
  for (int64_t t = from > 0 ? from : 1; c.begins && t < to; ++t)
    if (c.begins[t]) return false;
  return true;
}
// Decay of the state over a segment.
template <class R>
static R carried(const Chunked<R>& c, int64_t head, int64_t segment) {
  if (!c.decay) return 1;
  const int64_t from = segment * c.length, to = from + c.length < c.T ? from + c.length : c.T;
  const double* g = c.decay + head * c.T;
  return R(std::exp(g[to - 1] - (from > 0 ? g[from - 1] : 0)));
}
template <class R>
static void add(R* to, const R* from, R factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}
template <class R>
static void scan(const Chunked<R>& c, int64_t head) {
  for (int64_t j = 0; j + 1 < c.segments; ++j) {
    if (!survives(c, j)) continue;
    const int64_t from = head * (c.segments + 1) + j, n = c.F * c.E;
    const R left = carried(c, head, j);
    add(c.S + (from + 1) * n, c.S + from * n, left, n);
    add(c.z + (from + 1) * c.F, c.z + from * c.F, left, c.F);
  }
}
template <class R>
static void backward_scan(const Chunked<R>& c, int64_t head) {
  for (int64_t j = c.segments - 1; j > 0; --j) {
    if (!survives(c, j)) continue;
    const int64_t to = head * (c.segments + 1) + j, n = c.F * c.E;
    const R left = carried(c, head, j);
    add(c.dS + to * n, c.dS + (to + 1) * n, left, n);
    add(c.dz + to * c.F, c.dz + (to + 1) * c.F, left, c.F);
  }
}

template <class R>
inline constexpr ChunkedKernels<R> kKernels{
    scratch_size<R>,  sums_task<R>, forward_task<R>,  backward_sums_task<R>,
    backward_task<R>, scan<R>,      backward_scan<R>, solve_task<R>};
const ChunkedKernels<float> chunked_float = kKernels<float>;
const ChunkedKernels<double> chunked_double = kKernels<double>;

}  // namespace horner::attn::kernels::HORNER_ISA

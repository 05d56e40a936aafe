// Compiled once per instruction set. For each block of keys: scores, weights and N of all query
// heads that read it. Then the state, once for all of those heads.
#include "attn/kernels/cpu/decode/decode.h"

#include <cmath>
#include <cstring>

#include "attn/kernels/cpu/chunked/monomials.h"
#include "attn/kernels/cpu/chunked/scratch.h"

namespace horner::attn::kernels::HORNER_ISA {

inline constexpr int kKeys = 64;   // per block
inline constexpr int kHeads = 16;  // query heads are padded to a multiple of this

template <class R>
struct Step {
  using V = VecOf<R>;
  static constexpr int kL = kLanes<R>;

  const Decode<R>& c;
  int heads, padded;  // query heads per key head, and padded
  int64_t gh, b;      // b * G + key head, batch
  Scratch<R> scratch;
  R *x, *qT, *N, *W, *multiplier, *levels, *block, *share, *y, *kT;

  Step(const Decode<R>& c, int64_t task, R* memory)
      : c(c),
        heads(int(c.H / c.G)),
        padded((heads + kHeads - 1) / kHeads * kHeads),
        gh(task),
        b(task / c.G),
        scratch{memory} {
    const int C = padded > kKeys ? padded : kKeys;
    x = scratch.take(heads * kKeys), qT = scratch.take(c.D * padded);
    N = scratch.take(heads * c.E), W = scratch.take(padded),
    multiplier = scratch.take((c.last + 1) * padded);
    int64_t lower = c.S != nullptr;
    for (int p = 1; c.S && p < c.last; ++p) lower += monomials(c.D, p);
    levels = scratch.take(lower * C), block = scratch.take(kBlock * C);
    share = scratch.take(kKeys), y = scratch.take(kKeys * c.E), kT = scratch.take(c.D * kKeys);
  }

  const R* key(int64_t s) const { return c.k + (gh * c.room + s) * c.width; }
  const R* value(int64_t s) const { return c.v + (gh * c.room + s) * c.E; }
  const R* query(int r) const { return c.q + (gh * heads + r) * c.width; }
  double gate_sum(int64_t s) const { return c.decay[gh * c.room + s]; }
  double now() const { return c.decay && c.to > 0 ? gate_sum(c.to - 1) : 0; }

  bool kept(int64_t s) const { return !c.keep || c.keep[b * c.room + s]; }
  // x[r, j] of n keys from s; 0 where masked.
  void scores(int64_t s, int n) const {
    for (int r = 0; r < heads; ++r) {
      const R *q = query(r), centre = c.centre ? c.centre[gh * heads + r] : R(0);
      for (int j = 0; j < n; ++j) {
        const R* k = key(s + j);
        V sum{};
        for (int64_t d = 0; d < c.width; d += kL) sum += load(q + d) * load(k + d);
        x[r * kKeys + j] = sum_lanes<R>(sum) * c.scale;
      }
      if (c.softcap != 0)
        for (int j = 0; j < n; j += kL) {
          R* const at = x + r * kKeys + j;
          store(at, Maths<V>::tanh(load(at) / c.softcap) * c.softcap);
        }
      for (int j = 0; j < n; ++j) {
        const R y = x[r * kKeys + j] - centre;
        x[r * kKeys + j] = !kept(s + j) ? 0 : y > c.clamp ? c.clamp : y;
      }
      for (int j = n; j < kKeys; ++j) x[r * kKeys + j] = 0;
    }
  }
  // Decay and mask of n keys from s.
  void shares(int64_t s, int n) const {
    for (int j = 0; j < n; ++j)
      share[j] = !kept(s + j) ? R(0) : c.decay ? R(std::exp(now() - gate_sum(s + j))) : R(1);
    for (int j = n; j < kKeys; ++j) share[j] = 0;
  }
  void add_values(int64_t s, int n, R* w) const {
    if (c.gate)
      for (int r = 0; r < heads; ++r)
        for (int j = 0; j < n; ++j) w[r * kKeys + j] *= c.gate[gh * c.room + s + j];
    multiply<true>(ProductOf<R>{w, kKeys, 1, value(s), c.E, N, c.E, heads, int(c.E), n});
  }

  template <class Weight>
  void weigh(const Weight& weight, int64_t s, int n, R*) {
    scores(s, n);
    for (int r = 0; r < heads; ++r) {
      V sum{};
      for (int j = 0; j < kKeys; j += kL) {
        const V w = attn::weight(weight, load(x + r * kKeys + j)).w * load(share + j);
        store(x + r * kKeys + j, w), sum += w;
      }
      W[r] += sum_lanes<R>(sum);
    }
    add_values(s, n, x);
  }
  // Relative to the largest score so far, with the log of its decay.
  void weigh(Exp, int64_t s, int n, R* top) {
    scores(s, n);
    R log_share[kKeys];
    for (int j = 0; j < kKeys; ++j) {
      const bool seen = j < n && kept(s + j);
      log_share[j] = !seen ? R(-INFINITY) : c.decay ? R(now() - gate_sum(s + j)) : R(0);
      if (log_share[j] < R(kNoDecayLeft)) log_share[j] = R(-INFINITY);
    }
    for (int r = 0; r < heads; ++r) {
      V largest = splat(top[r]);
      for (int j = 0; j < kKeys; j += kL) {
        const V y = load(x + r * kKeys + j) + load(log_share + j);
        store(x + r * kKeys + j, y);
        largest = y > largest ? y : largest;
      }
      const R before = top[r];
      for (int i = 0; i < kL; ++i)
        if (largest[i] > top[r]) top[r] = largest[i];
      if (top[r] > before) {
        const R left = std::exp(before - top[r]);
        W[r] *= left;
        for (int64_t e = 0; e < c.E; ++e) N[r * c.E + e] *= left;
      }
      const R shift = top[r] == -INFINITY ? 0 : top[r];
      V sum{};
      for (int j = 0; j < kKeys; j += kL) {
        const V w = Maths<V>::exp(load(x + r * kKeys + j) - shift);
        store(x + r * kKeys + j, w), sum += w;
      }
      W[r] += sum_lanes<R>(sum);
    }
    add_values(s, n, x);
  }

  Monomials<R> of_queries() const {
    for (int64_t d = 0; d < c.D; ++d)
      for (int r = 0; r < padded; ++r)
        qT[d * padded + r] = r < heads ? query(r)[d] * c.scale : R(0);
    const bool plain = !c.centre && !c.decay;
    for (int r = 0; !plain && r < padded; ++r) {
      const R b = c.centre && r < heads ? -c.centre[gh * heads + r] : R(0);
      const R left = c.decay ? R(std::exp(now())) : R(1);
      R e = 0, term = 1;
      for (int m = 0; m <= c.last; ++m) {
        e += term, term *= b / (m + 1);
        multiplier[(c.last - m) * padded + r] = (c.centre ? e : R(1)) * left;
      }
    }
    return {
        int(c.D), c.first, c.last, padded, false, qT, levels, block, plain ? nullptr : multiplier};
  }
  const R* S() const { return c.S + gh * c.F * c.E; }

  void forward() {
    std::memset(N, 0, sizeof(R) * size_t(heads * c.E)),
        std::memset(W, 0, sizeof(R) * size_t(padded));
    R* top = c.shift + gh * heads;
    for (int r = 0; r < heads; ++r) top[r] = std::holds_alternative<Exp>(c.weight) ? -INFINITY : 0;
    const auto add_keys = [&](int64_t from, int64_t to) {
      for (int64_t s = from; s < to; s += kKeys) {
        const int n = int(to - s < kKeys ? to - s : kKeys);
        shares(s, n);
        std::visit([&](const auto& w) { weigh(w, s, n, top); }, c.weight);
      }
    };
    add_keys(0, c.first_keys < c.from ? c.first_keys : c.from);
    add_keys(c.from, c.to);
    for (int r = 0; r < heads; ++r)
      if (top[r] == -INFINITY) top[r] = 0;
    if (c.S) {
      const Monomials<R> m = of_queries();
      m.expand();
      apply_state(m, ApplyState<R>{S(), c.z + gh * c.F, heads, c.E, N, W});
    }
    std::memcpy(c.N + gh * heads * c.E, N, sizeof(R) * size_t(heads * c.E));
    std::memcpy(c.W + gh * heads, W, sizeof(R) * size_t(heads));
  }

  void fold() {
    R *S = c.S + gh * c.F * c.E, *z = c.z + gh * c.F;
    if (c.decay) {
      const R left = R(std::exp(now()));
      for (int64_t i = 0; i < c.F * c.E; ++i) S[i] *= left;
      for (int64_t i = 0; i < c.F; ++i) z[i] *= left;
    }
    for (int64_t s = c.from; s < c.to; s += kKeys) {
      const int n = int(c.to - s < kKeys ? c.to - s : kKeys),
                C = (n + kHeads - 1) / kHeads * kHeads;
      shares(s, n);
      for (int64_t d = 0; d < c.D; ++d)
        for (int j = 0; j < C; ++j) kT[d * C + j] = j < n && kept(s + j) ? key(s + j)[d] : R(0);
      for (int j = 0; j < n; ++j)
        for (int64_t e = 0; e < c.E; e += kL)
          store(y + j * c.E + e, kept(s + j) ? load(value(s + j) + e) * share[j] : V{});
      const Monomials<R> m{int(c.D), c.first, c.last, C, true, kT, levels, block, nullptr};
      m.expand();
      kernels::HORNER_ISA::fold(m, Fold<R>{y, share, n, c.E, S, z});
    }
  }
};

template <class R>
static int64_t scratch_size(const Decode<R>& c) {
  return Step<R>(c, 0, nullptr).scratch.used;
}
template <class R>
static void forward_task(const Decode<R>& c, int64_t task, R* scratch) {
  Step<R>(c, task, scratch).forward();
}
template <class R>
static void fold_task(const Decode<R>& c, int64_t task, R* scratch) {
  Step<R>(c, task, scratch).fold();
}

const DecodeKernels<float> decode_float{scratch_size<float>, forward_task<float>, fold_task<float>};
const DecodeKernels<double> decode_double{scratch_size<double>, forward_task<double>,
                                          fold_task<double>};

}  // namespace horner::attn::kernels::HORNER_ISA

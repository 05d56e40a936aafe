// Compiled once per instruction set. For each block of keys: scores, weights and N of all query
// heads that read it, of near keys first. Then the state, once for all of those heads.
#include "attn/kernels/cpu/decode/decode.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "attn/kernels/cpu/chunked/monomials.h"
#include "attn/kernels/cpu/chunked/scratch.h"

namespace horner::attn::kernels::HORNER_ISA {

inline constexpr int kKeys = 64;   // per block
inline constexpr int kHeads = 16;  // query heads are padded to a multiple of this

typedef uint16_t Halves __attribute__((vector_size(2 * kWidth), aligned(2), may_alias));

template <class R>
struct Step {
  using V = VecOf<R>;
  static constexpr int kL = kLanes<R>;

  const Decode<R>& c;
  int heads, padded;  // query heads per key head, and padded
  int64_t gh, b;      // b * G + key head, batch
  Scratch<R> scratch;
  R *x, *qT, *N, *W, *multiplier, *levels, *block, *share, *y, *kT;
  R *centre, *rest;  // of each query head: what its scores are less; of what is far, e^-shift
  R* wide_v;         // a block of values in bfloat16
  const R* values;   // of the block

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
    centre = scratch.take(padded), rest = scratch.take(padded);
    wide_v = scratch.take(c.v16 ? kKeys * c.E : 0);
  }

  const R* key(int64_t s) const { return c.k + (gh * c.room + s) * c.width; }
  const R* value(int64_t s) const { return c.v + (gh * c.room + s) * c.E; }
  const R* query(int r) const { return c.q + (gh * heads + r) * c.width; }
  int64_t first_near() const { return c.to - c.near > c.from ? c.to - c.near : c.from; }
  double gate_sum(int64_t s) const { return c.decay[gh * c.room + s]; }
  double now() const { return c.decay && c.to > 0 ? gate_sum(c.to - 1) : 0; }

  // kL numbers in bfloat16.
  static V load16(const uint16_t* from) {
    if constexpr (std::is_same_v<R, float>)
      return Vec(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), VecInt) << 16);
    else
      return V{};  // caches of double inputs are not
  }
  // The values of n keys from s.
  void read_values(int64_t s, int n) {
    values = c.v16 ? wide_v : value(s);
    if (!c.v16) return;
    const uint16_t* const from = c.v16 + (gh * c.room + s) * c.E;
    for (int64_t i = 0; i < n * c.E; i += kL) store(wide_v + i, load16(from + i));
  }

  bool kept(int64_t s) const { return !c.keep || c.keep[b * c.room + s]; }
  static V load_any(const R* p) { return load(p); }
  static V load_any(const uint16_t* p) { return load16(p); }
  template <class T>
  static R dot(const R* a, const T* b, int64_t n) {
    V sum{};
    for (int64_t d = 0; d < n; d += kL) sum += load(a + d) * load_any(b + d);
    return sum_lanes<R>(sum);
  }
  // q.k of n keys from s.
  template <class T>
  void products(const R* q, const T* k, int64_t width, int64_t s, int n, R* to) const {
    k += (gh * c.room + s) * width;
    for (int j = 0; j < n; ++j) to[j] = dot(q, k + j * width, width);
  }
  // x[r, j] of n keys from s; 0 where masked.
  void scores(int64_t s, int n, bool near) const {
    for (int r = 0; r < heads; ++r) {
      R* const to = x + r * kKeys;
      const R* const q = near ? c.near_q + (gh * heads + r) * c.near_width : query(r);
      if (near && c.near_k)
        products(q, c.near_k, c.near_width, s, n, to);
      else if (c.k16)
        products(q, c.k16, c.width, s, n, to);
      else
        products(q, c.k, c.width, s, n, to);
      for (int j = 0; j < n; ++j) to[j] *= near ? c.near_scale : c.scale;
      if (c.softcap != 0)
        for (int j = 0; j < n; j += kL) {
          R* const at = x + r * kKeys + j;
          store(at, Maths<V>::tanh(load(at) / c.softcap) * c.softcap);
        }
      for (int j = 0; j < n; ++j) {
        const R y = x[r * kKeys + j] - centre[r];
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
    multiply<true>(ProductOf<R>{w, kKeys, 1, values, c.E, N, c.E, heads, int(c.E), n});
  }

  // N and W relative to a larger shift.
  void raise(int r, R from, R to) const {
    const R left = std::exp(from - to);
    W[r] *= left;
    for (int64_t e = 0; e < c.E; ++e) N[r * c.E + e] *= left;
  }

  template <class Weight>
  void weigh(const Weight& weight, int64_t s, int n, R*) {
    scores(s, n, false);
    for (int r = 0; r < heads; ++r) {
      V sum{};
      for (int j = 0; j < kKeys; j += kL) {
        const V w = attn::weight(weight, load(x + r * kKeys + j)).w * load(share + j) * rest[r];
        store(x + r * kKeys + j, w), sum += w;
      }
      W[r] += sum_lanes<R>(sum);
    }
    add_values(s, n, x);
  }
  // Relative to the largest score so far, with the log of its decay.
  void weigh(Exp, int64_t s, int n, R* top) {
    scores(s, n, c.near > 0);
    R log_share[kKeys];
    for (int j = 0; j < kKeys; ++j) {
      const bool seen = j < n && kept(s + j);
      log_share[j] = !seen ? R(-INFINITY) : c.decay ? R(now() - gate_sum(s + j)) : R(0);
      if (log_share[j] < R(kNoDecayLeft)) log_share[j] = R(-INFINITY);
    }
    for (int r = 0; r < heads; ++r) {
      for (int j = 0; c.near_share && j < n; ++j)  // without its decay
        if (const R y = x[r * kKeys + j]; kept(s + j) && y > rest[r]) rest[r] = y;
      V largest = splat(top[r]);
      for (int j = 0; j < kKeys; j += kL) {
        const V y = load(x + r * kKeys + j) + load(log_share + j);
        store(x + r * kKeys + j, y);
        largest = y > largest ? y : largest;
      }
      const R before = top[r];
      for (int i = 0; i < kL; ++i)
        if (largest[i] > top[r]) top[r] = largest[i];
      if (top[r] > before) raise(r, before, top[r]);
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
    const bool centred = c.centre || c.keys, plain = !centred && !c.decay && c.near == 0;
    const R decay = c.decay ? R(std::exp(now())) : R(1);
    for (int r = 0; !plain && r < padded; ++r) {
      const R b = r < heads ? -centre[r] : R(0), left = r < heads ? decay * rest[r] : R(0);
      R e = 0, term = 1;
      for (int m = 0; m <= c.last; ++m) {
        e += term, term *= b / (m + 1);
        multiplier[(c.last - m) * padded + r] = (centred ? e : R(1)) * left;
      }
    }
    return {
        int(c.D), c.first, c.last, padded, false, qT, levels, block, plain ? nullptr : multiplier};
  }
  const R* S() const { return c.S + gh * c.F * c.E; }

  // The number of keys seen that are not near.
  double far_count() const {
    double n = c.count[b];
    for (int64_t s = first_near(); c.near > 0 && s < c.to; ++s) n -= kept(s);
    return n;
  }
  void find_centres() const {
    for (int r = 0; r < heads; ++r) centre[r] = c.centre ? c.centre[gh * heads + r] : R(0);
    const double n = c.keys ? far_count() : 0;
    for (int r = 0; n > 0 && r < heads; ++r) {
      double sum = 0;
      for (int64_t d = 0; d < c.D; ++d) sum += double(query(r)[d]) * c.keys[gh * c.D + d];
      centre[r] += R(sum / n) * c.scale;
    }
  }
  // A shift below 0 would let the weights of far keys overflow.
  void leave_room_for_far(R* top) const {
    const bool any = far_count() > 0;
    for (int r = 0; r < heads; ++r) {
      if (any && top[r] < 0) raise(r, top[r], 0), top[r] = 0;
      rest[r] = any ? std::exp(-top[r]) : R(0);
    }
  }
  // The largest near score, in `rest`, is not a shift but part of the near weights.
  void take_share(R* top) const {
    const R* share = c.near_share + gh % c.G * heads;
    for (int r = 0; r < heads; ++r) {
      const R by = share[r] * std::exp(top[r] == -INFINITY ? 0 : top[r] - rest[r]);
      W[r] *= by, top[r] = 0, rest[r] = 1;
      for (int64_t e = 0; e < c.E; ++e) N[r * c.E + e] *= by;
    }
  }
  template <class Weight>
  void add_keys(const Weight& weight, int64_t from, int64_t to, R* top) {
    for (int64_t s = from; s < to; s += kKeys) {
      const int n = int(to - s < kKeys ? to - s : kKeys);
      read_values(s, n), shares(s, n);
      weigh(weight, s, n, top);
    }
  }

  void forward() {
    std::memset(N, 0, sizeof(R) * size_t(heads * c.E)),
        std::memset(W, 0, sizeof(R) * size_t(padded));
    R* top = c.shift + gh * heads;
    const bool relative = c.near > 0 || std::holds_alternative<Exp>(c.weight);
    for (int r = 0; r < heads; ++r)
      top[r] = relative ? -INFINITY : 0, rest[r] = c.near_share ? -INFINITY : 1;
    find_centres();
    if (c.near > 0) {
      add_keys(Exp{}, first_near(), c.to, top);
      c.near_share ? take_share(top) : leave_room_for_far(top);
    }
    const auto add_far = [&](int64_t from, int64_t to) {
      std::visit([&](const auto& w) { add_keys(w, from, to, top); }, c.weight);
    };
    add_far(0, c.first_keys < c.from ? c.first_keys : c.from);
    add_far(c.from, c.near > 0 ? first_near() : c.to);
    for (int r = 0; r < heads; ++r)
      if (top[r] == -INFINITY) top[r] = 0;
    if (c.S && far_count() > 0) {  // else S is 0, and NaN times that is not
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

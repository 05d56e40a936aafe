// An attention operator, as data.
//
//   x_ts = min(clamp, scale_t * f(q_t).f(k_s) - centre_t - log n)    score
//   u_s  = values(in_s * v_s)                                        values
//   N_t  = sum_{s seen by t}  w(x_ts) * decay_ts * u_s               numerator
//   W_t  = sum_{s seen by t}  w(x_ts) * decay_ts                     row sum
//   o_t  = post_t * norm(out_t * N_t / Z_t),   Z_t = denominator(W_t, ...)
//
// n is the number of keys that t sees. A row whose N and W are both zero gives 0.
// A named variant is one value of Spec (catalog.cpp), an execution (exec/) an interpreter of Spec.
// No torch and no CUDA here: host and device code both include this file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <variant>

namespace horner::attn {

// f: the map of queries and keys.
struct Identity {};
struct Elu1 {};             // elu(x) + 1
struct Relu {};             // max(x, 0)
struct Cosine {             // x / |x|
  bool over_heads = false;  // |x| is taken over the heads of a token instead of its channels
};
struct Project {  // P_h x, learned, one for queries and one for keys
  int dim = 16;
};
using Features = std::variant<Identity, Elu1, Relu, Cosine, Project>;

// scale: the factor of the product.
struct RootDim {};  // 1 / sqrt(the length of f(q))
struct Fixed {
  float factor = 1;
};
using Scale = std::variant<RootDim, Fixed>;

// sharpness: a second factor, from n or from the row itself.
struct Flat {};       // 1
struct LogLength {};  // s_h log n, s_h learned (SSMax)
struct LogPower {};   // delta_h + beta_h (log n)^gamma_h, learned (ASEntmax)
struct Adaptive {};   // from the entropy of the row's softmax, without gradient
using Sharpness = std::variant<Flat, LogLength, LogPower, Adaptive>;

// w: the weight of a score, from that score alone (math.h) or from the whole row.
struct Exp {};
struct Taylor {  // sum_{n <= order} x^n / n!
  int order = 2;
};
struct Power {  // x^degree / degree!
  int degree = 1;
};
struct Sigmoid {};
struct Entmax {  // max((alpha - 1) x - tau, 0)^(1 / (alpha - 1)), summing to 1; 2 is sparsemax
  float alpha = 1.5f;
};
struct TopK {  // softmax of the k largest scores
  int k = 32;
  bool renormalise = true;  // false: the k largest weights of the row's softmax
};
struct SelfAdjusted {};  // (x - min(x, 0)) / (max(x, 0) - min(x, 0)) * softmax(x), over the row
using Weight = std::variant<Exp, Taylor, Power, Sigmoid, Entmax, TopK, SelfAdjusted>;

struct Orders {
  int first, last;
};
struct Fact {  // without a default: every weight has to decide
  bool value;
  constexpr Fact(bool v) : value(v) {}
  constexpr operator bool() const { return value; }
};
struct WeightFacts {      // from which every interpreter decides what to do with a weight
  Fact of_one_score;      // false: of the whole row
  Fact on_gpu;            // exec/cuda.cpp maps it to a weight of the CUDA kernels
  bool negative = false;  // for some scores
  std::optional<Orders> orders = {};  // of a polynomial: it has a finite state
};
struct FactsOf {
  // clang-format off
  constexpr WeightFacts operator()(Exp) const { return {.of_one_score = true, .on_gpu = true}; }
  constexpr WeightFacts operator()(Taylor w) const { return {.of_one_score = true, .on_gpu = true, .negative = w.order % 2 == 1, .orders = Orders{0, w.order}}; }
  constexpr WeightFacts operator()(Power w) const { return {.of_one_score = true, .on_gpu = true, .negative = w.degree % 2 == 1, .orders = Orders{w.degree, w.degree}}; }
  constexpr WeightFacts operator()(Sigmoid) const { return {.of_one_score = true, .on_gpu = true}; }
  constexpr WeightFacts operator()(Entmax) const { return {.of_one_score = false, .on_gpu = true}; }
  constexpr WeightFacts operator()(TopK) const { return {.of_one_score = false, .on_gpu = true}; }
  constexpr WeightFacts operator()(SelfAdjusted) const { return {.of_one_score = false, .on_gpu = true}; }
  // clang-format on
};
inline WeightFacts facts(const Weight& w) {
  return std::visit(FactsOf{}, w);
}

// mask: the keys that a query may see, an interval. Query t of T stands at position
// p = t + S - T: the last query at the last of the S keys.
struct Full {};
struct Causal {};
struct Window {  // the last `size` keys, its own among them
  int size = 128;
};
using Mask = std::variant<Full, Causal, Window>;

// The interval of position p: `back` keys up to its own and `ahead` keys after it, within [0, S).
struct Reach {
  int back, ahead;
};
inline constexpr int kAllKeys = std::numeric_limits<int>::max();
struct ReachOf {
  constexpr Reach operator()(Full) const { return {kAllKeys, kAllKeys}; }
  constexpr Reach operator()(Causal) const { return {kAllKeys, 0}; }
  constexpr Reach operator()(Window m) const { return {m.size, 0}; }
};
inline Reach reach(const Mask& m) {
  return std::visit(ReachOf{}, m);
}
inline bool sees_future(const Mask& m) {
  return reach(m).ahead > 0;
}
inline bool sees_all_past(const Mask& m) {
  return reach(m).back == kAllKeys;
}
struct Interval {
  int64_t lo, hi;  // lo <= s < hi
};
inline Interval interval(const Mask& m, int64_t t, int64_t S, int64_t T) {
  const auto [back, ahead] = reach(m);
  const int64_t past = t + S - T + 1;
  return {std::max<int64_t>(0, past - back), std::clamp<int64_t>(past + ahead, 0, S)};
}

// decay: a factor of each weight that shrinks with the distance t - s.
struct NoDecay {};
struct TokenGate {};  // the product of the gates of the tokens in (s, t]
struct HeadSlope {};  // e^(-slope_h (t - s))
using Decay = std::variant<NoDecay, TokenGate, HeadSlope>;

// values: what the sum sees of a value.
struct AsGiven {};
struct CountPower {};  // v_s / n_s^sigmoid(m_h), n_s the keys that position s sees (Cottention)
using Values = std::variant<AsGiven, CountPower>;

// Z: the divisor of the numerator.
struct Sum {        // max(W + plus, least, floor * n); where |Z| < 1e-6, 1e-6 with the sign of Z
  float plus = 0;   // softmax1 has 1
  float least = 0;  // 0: no bound
  float floor = 0;  // the least mean weight of the n keys seen; 0: no bound
  bool detach = false;  // no gradient through Z
};
struct Count {};         // n
struct CumulativeGate {  // max(sum of e^gate over the keys seen, least)
  float least = 0;
  bool times_count = false;
};
struct Nothing {};  // 1
using Denominator = std::variant<Sum, Count, CumulativeGate, Nothing>;

// norm: over the channels of the result.
struct NoNorm {};
struct L2 {  // o / |o|; 0 for o = 0
  bool times_dim = false;
};
struct Rms {  // learned weight
  float eps = 1e-5f;
};
struct Layer {  // learned weight and bias
  float eps = 1e-5f;
};
using Norm = std::variant<NoNorm, L2, Rms, Layer>;

inline constexpr float kNoClamp = std::numeric_limits<float>::infinity();

struct Spec {
  Features features = Identity{};
  Scale scale = RootDim{};
  float temperature = 1;  // divides the scale
  Sharpness sharpness = Flat{};
  bool centred = false;         // subtract the row's mean score
  bool less_log_count = false;  // subtract log n
  float clamp = kNoClamp;
  Weight weight = Exp{};
  Mask mask = Causal{};
  Decay decay = NoDecay{};
  bool input_gate = false;  // in_s, one number in (0, 1) per head and token, as are out and post
  Values values = AsGiven{};
  Denominator denominator = Sum{};
  bool output_gate = false;  // out_t
  Norm norm = NoNorm{};
  bool post_gate = false;  // post_t
};

// is<Exp>(spec.weight)
template <class T, class... Ts>
bool is(const std::variant<Ts...>& v) {
  return std::holds_alternative<T>(v);
}

}  // namespace horner::attn

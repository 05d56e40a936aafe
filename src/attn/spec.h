// An attention operator, as data.
//
//   x_ts = min(clamp, softcap(scale_t * f(q_t).f(k_s)) + bias_ts - centre_t - log n)    score
//   u_s  = values(in_s * v_s)                                        values
//   N_t  = sum_{s seen by t}  w(x_ts) * decay_ts * kept_ts * u_s     numerator
//   W_t  = sum_{s seen by t}  w(x_ts) * decay_ts                     row sum
//   o_t  = post_t * norm(out_t * N_t / Z_t),   Z_t = denominator(W_t, ...)
//
// n is the number of keys that t sees. Keys that are near have another weight, where a spec says
// so; the others are far. centre_t is the mean score of the far keys that t sees, 0 without any.
// kept_ts is dropout: 0 with probability p, else 1 / (1 - p). A row with N = W = 0 gives 0.
// A named variant is one value of Spec (catalog.cpp), an execution (exec/) an interpreter of Spec.
// No torch and no CUDA here: host and device code both include this file.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <variant>

#include "attn/mask.h"

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
struct Hedgehog {  // [softmax(P_h x), softmax(-P_h x)], P_h learned as for Project
  int dim = 64;
};
using Features = std::variant<Identity, Elu1, Relu, Cosine, Project, Hedgehog>;

// scale: the factor of the product.
struct RootDim {};  // 1 / sqrt(the length of f(q))
struct Fixed {
  double factor = 1;
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
  double alpha = 1.5;
};
struct TopK {  // softmax of the k largest scores
  int k = 32;
  bool renormalise = true;  // false: the k largest weights of the row's softmax
};
struct SelfAdjusted {};   // (x - min(x, 0)) / (max(x, 0) - min(x, 0)) * softmax(x), over the row
struct Softpick {};       // max(e^x - 1, 0); W sums |e^x - 1|
struct StickBreaking {};  // sigmoid(x_ts) times 1 - sigmoid(x_tr) of every later key r that t sees
using Weight =
    std::variant<Exp, Taylor, Power, Sigmoid, Entmax, TopK, SelfAdjusted, Softpick, StickBreaking>;

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
  constexpr WeightFacts operator()(Softpick) const { return {.of_one_score = false, .on_gpu = true}; }
  constexpr WeightFacts operator()(StickBreaking) const { return {.of_one_score = false, .on_gpu = false}; }
  // clang-format on
};
inline WeightFacts facts(const Weight& w) {
  return std::visit(FactsOf{}, w);
}

// near: keys whose weight is softmax's, whatever that of the others: exp of the score, which for
// other features than Identity is q.k / sqrt(D), divided by the temperature, less the centre.
struct NoKeys {};
using Near = std::variant<NoKeys, Window>;
// near_share: near keys weigh sigmoid(share_h) e^(x - the largest near score of the row), so that
// no row of them exceeds what features can weigh. Otherwise e^x.

// decay: a factor of each weight that shrinks with the distance t - s.
struct NoDecay {};
struct TokenGate {};    // the product of the gates of the tokens in (s, t]
struct HeadSlope {};    // e^(-slope_h (t - s))
struct ChannelGate {};  // of each product q_d k_d: the product of the gates of channel d in (s, t]
using Decay = std::variant<NoDecay, TokenGate, HeadSlope, ChannelGate>;
inline constexpr double kNoDecayLeft = -700;  // a decay with a log below this is 0

// values: what the sum sees of a value.
struct AsGiven {};
struct CountPower {};  // v_s / n_s^sigmoid(m_h), n_s the keys that position s sees (Cottention)
// The value less what the earlier ones already give for its key (the delta rule), 0 for a key that
// gives nothing:
//   u_s = b_s / w(k_s.k_s) * (v_s - sum_{r < s} w(k_s.k_r) decay_sr u_r),   b_s = most * beta_s
struct Delta {
  double most = 1;
};
using Values = std::variant<AsGiven, CountPower, Delta>;

// Z: the divisor of the numerator.
struct Sum {  // max(W + plus + sink, least, floor * n); where |Z| < 1e-6, 1e-6 with the sign of Z
  double plus = 0;      // softmax1 has 1
  double least = 0;     // 0: no bound
  double floor = 0;     // the least mean weight of the n far keys seen; 0: no bound
  bool detach = false;  // no gradient through Z
  bool sink = false;    // e^sink_h, learned
};
struct Count {};         // n
struct CumulativeGate {  // max(sum of e^gate over the keys seen, least)
  double least = 0;
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
  double eps = 1e-5;
};
struct Layer {  // learned weight and bias
  double eps = 1e-5;
};
using Norm = std::variant<NoNorm, L2, Rms, Layer>;

inline constexpr double kNoClamp = std::numeric_limits<double>::infinity();

struct Spec {
  Features features = Identity{};
  Scale scale = RootDim{};
  double temperature = 1;  // divides the scale
  Sharpness sharpness = Flat{};
  double softcap = 0;           // c tanh(x / c); 0: none
  bool bias = false;            // bias_ts, one number for each pair
  bool centred = false;         // subtract the mean score of the row's far keys
  bool less_log_count = false;  // subtract log n
  double clamp = kNoClamp;
  Weight weight = Exp{};
  Near near = NoKeys{};
  bool near_share = false;
  Mask mask = Causal{};
  Decay decay = NoDecay{};
  double dropout = 0;       // p, the share of the pairs that N leaves out
  bool input_gate = false;  // in_s, one number in (0, 1) per head and token, as are out and post
  Values values = AsGiven{};
  Denominator denominator = Sum{};
  bool output_gate = false;  // out_t
  Norm norm = NoNorm{};
  bool post_gate = false;      // post_t
  bool channel_gates = false;  // out and post have a number for each channel
};

// is<Exp>(spec.weight)
template <class T, class... Ts>
bool is(const std::variant<Ts...>& v) {
  return std::holds_alternative<T>(v);
}

}  // namespace horner::attn

// An attention operator, as data.
//
//   x_ts = min(clamp, scale_t * f(q_t).f(k_s) - centre_t)            score
//   N_t  = sum_{s seen by t}  w(x_ts) * decay_ts * in_s * v_s        numerator
//   W_t  = sum_{s seen by t}  w(x_ts) * decay_ts                     row sum
//   o_t  = post_t * norm(out_t * N_t / Z_t),   Z_t = denominator(W_t, ...)
//
// A row whose N and W are both zero (no key seen, or every weight zero) gives 0.
// A named variant is one value of Spec (catalog.cpp). An execution (exec/) is an interpreter of
// Spec. No torch and no CUDA here: host, device and Python code all read this file.
#pragma once

#include <limits>
#include <variant>

namespace horner::attn {

// f: what a query and a key become before they meet.
struct Identity {};
struct Elu1 {};             // elu(x) + 1
struct Relu {};             // max(x, 0)
struct Cosine {             // x / |x|
  bool over_heads = false;  // the length is taken over the heads of a token, not over its channels
};
struct Project {  // P_h x, learned, one for queries and one for keys
  int dim = 16;
};
using Features = std::variant<Identity, Elu1, Relu, Cosine, Project>;

// scale: what multiplies the product.
struct RootDim {};  // 1 / sqrt(the length of f(q))
struct Fixed {
  float factor = 1;
};
using Scale = std::variant<RootDim, Fixed>;

// sharpness: what the scale is multiplied by, from the number n of keys seen or from the row
// itself.
struct Flat {};
struct LogLength {};  // s_h log n, s_h learned (SSMax)
struct LogPower {};   // delta_h + beta_h (log n)^gamma_h, learned (ASEntmax)
struct Adaptive {};   // from the entropy of the row's softmax, taken as a constant by gradients
using Sharpness = std::variant<Flat, LogLength, LogPower, Adaptive>;

// w: what a score becomes. The first four are of one score, with a value and a derivative; the
// rest are of the whole row.
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
  bool renormalise = true;  // false: softmax of the row, of which the k largest are kept
};
struct SelfAdjusted {};  // (x - min(x, 0)) / (max(x, 0) - min(x, 0)) * softmax(x), over the row
using Weight = std::variant<Exp, Taylor, Power, Sigmoid, Entmax, TopK, SelfAdjusted>;

// mask: the keys that query t may see, always an interval. Where there are more keys than queries,
// the last query stands at the last key.
struct Full {};
struct Causal {};
struct Window {  // the last `size` keys, its own among them
  int size = 128;
};
using Mask = std::variant<Full, Causal, Window>;

// decay: how a weight fades with the distance t - s.
struct NoDecay {};
struct TokenGate {};  // the product of the gates of the tokens in (s, t]
using Decay = std::variant<NoDecay, TokenGate>;

// Z: what divides the numerator.
struct Sum {            // max(W + plus, least); of a |Z| under 1e-6, 1e-6 with its sign
  float plus = 0;       // softmax1 has 1
  float least = 0;      // 0: no bound
  bool detach = false;  // no gradient through Z
};
struct Count {};         // the number of keys seen
struct CountPower {};    // count^sigmoid(m_h), m_h learned (Cottention)
struct CumulativeGate {  // max(sum of e^gate over the keys seen, least)
  float least = 0;
  bool times_count = false;
};
struct Nothing {};  // 1
using Denominator = std::variant<Sum, Count, CountPower, CumulativeGate, Nothing>;

// norm: over the channels of the result.
struct NoNorm {};
struct L2 {  // o / |o|, whatever the scale of o; of 0, 0
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
  bool centred = false;  // subtract the row's mean score
  float clamp = kNoClamp;
  Weight weight = Exp{};
  Mask mask = Causal{};
  Decay decay = NoDecay{};
  bool input_gate = false;  // in_s, one number in (0, 1) per head and token, as are out and post
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

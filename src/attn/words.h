// The words of every alternative of every stage: its name, its parameters with their ranges
// (spec_text.cpp prints, parses and checks them) and its formula (formula.cpp).
#pragma once

#include <string>

#include "attn/spec.h"

namespace horner::attn {

template <class T>
struct Parameter {
  const char* name;
  T& value;
  double least, most;
};
inline Parameter<bool> flag(const char* name, bool& value) {
  return {name, value, 0, 1};
}

// clang-format off
template <class V> void describe(Identity&, V&& v)       { v("identity"); }
template <class V> void describe(Elu1&, V&& v)           { v("elu1"); }
template <class V> void describe(Relu&, V&& v)           { v("relu"); }
template <class V> void describe(Cosine& s, V&& v)       { v("cosine", flag("over_heads", s.over_heads)); }
template <class V> void describe(Project& s, V&& v)      { v("project", Parameter<int>{"dim", s.dim, 1, 1024}); }
template <class V> void describe(RootDim&, V&& v)        { v("root_dim"); }
template <class V> void describe(Fixed& s, V&& v)        { v("fixed", Parameter<float>{"factor", s.factor, -1e6, 1e6}); }
template <class V> void describe(Flat&, V&& v)           { v("flat"); }
template <class V> void describe(LogLength&, V&& v)      { v("log_length"); }
template <class V> void describe(LogPower&, V&& v)       { v("log_power"); }
template <class V> void describe(Adaptive&, V&& v)       { v("adaptive"); }
template <class V> void describe(Exp&, V&& v)            { v("exp"); }
template <class V> void describe(Taylor& s, V&& v)       { v("taylor", Parameter<int>{"order", s.order, 0, 170}); }
template <class V> void describe(Power& s, V&& v)        { v("power", Parameter<int>{"degree", s.degree, 0, 170}); }
template <class V> void describe(Sigmoid&, V&& v)        { v("sigmoid"); }
template <class V> void describe(Entmax& s, V&& v)       { v("entmax", Parameter<float>{"alpha", s.alpha, 1.01, 2}); }
template <class V> void describe(TopK& s, V&& v)         { v("topk", Parameter<int>{"k", s.k, 1, 1 << 30}, flag("renormalise", s.renormalise)); }
template <class V> void describe(SelfAdjusted&, V&& v)   { v("self_adjusted"); }
template <class V> void describe(Full&, V&& v)           { v("full"); }
template <class V> void describe(Causal&, V&& v)         { v("causal"); }
template <class V> void describe(Window& s, V&& v)       { v("window", Parameter<int>{"size", s.size, 1, 1 << 30}); }
template <class V> void describe(NoDecay&, V&& v)        { v("none"); }
template <class V> void describe(TokenGate&, V&& v)      { v("token_gate"); }
template <class V> void describe(HeadSlope&, V&& v)      { v("slope"); }
template <class V> void describe(AsGiven&, V&& v)        { v("as_given"); }
template <class V> void describe(CountPower&, V&& v)     { v("count_power"); }
template <class V> void describe(Sum& s, V&& v)          { v("sum", Parameter<float>{"plus", s.plus, 0, 1e6}, Parameter<float>{"least", s.least, 0, 1e6}, Parameter<float>{"floor", s.floor, 0, 1}, flag("detach", s.detach)); }
template <class V> void describe(Count&, V&& v)          { v("count"); }
template <class V> void describe(CumulativeGate& s, V&& v) { v("cumulative_gate", Parameter<float>{"least", s.least, 0, 1e6}, flag("times_count", s.times_count)); }
template <class V> void describe(Nothing&, V&& v)        { v("nothing"); }
template <class V> void describe(NoNorm&, V&& v)         { v("none"); }
template <class V> void describe(L2& s, V&& v)           { v("l2", flag("times_dim", s.times_dim)); }
template <class V> void describe(Rms& s, V&& v)          { v("rms", Parameter<float>{"eps", s.eps, 0, 1}); }
template <class V> void describe(Layer& s, V&& v)        { v("layer", Parameter<float>{"eps", s.eps, 0, 1}); }
// clang-format on

// Formulas; the letters are explained in formula.cpp, where these two are defined.
std::string decimal(float);  // "5", "0.5", "−3", "10⁻⁸", "2·10⁻⁸"
std::string term(int n);     // "x³/3!"

struct ProductText {
  std::string operator()(Identity) const { return "q·k"; }
  std::string operator()(Elu1) const { return "(elu(q) + 1)·(elu(k) + 1)"; }
  std::string operator()(Relu) const { return "relu(q)·relu(k)"; }
  std::string operator()(Cosine f) const {
    return f.over_heads ? "(q/ℓ)·(k/ℓ)" : "(q/|q|)·(k/|k|)";
  }
  std::string operator()(Project) const { return "(P q)·(R k)"; }
};

struct SharpnessText {
  std::string operator()(Flat) const { return ""; }
  std::string operator()(LogLength) const { return "a log(n) · "; }
  std::string operator()(LogPower) const { return "(δ + β log(n)^γ) · "; }
  std::string operator()(Adaptive) const { return "θ · "; }
};

struct WeightText {
  std::string operator()(Exp) const { return "exp(x)"; }
  std::string operator()(Taylor w) const {
    const int written = w.order <= 5 ? w.order : 3;
    std::string out = "1";
    for (int n = 1; n <= written; ++n) out += " + " + term(n);
    return written == w.order ? out : out + " + … + " + term(w.order);
  }
  std::string operator()(Power w) const { return term(w.degree); }
  std::string operator()(Sigmoid) const { return "1 / (1 + exp(−x))"; }
  std::string operator()(Entmax w) const {
    if (w.alpha == 2) return "max(x − τ, 0)";
    if (w.alpha == 1.5f) return "max(x/2 − τ, 0)²";
    const std::string a = "(" + decimal(w.alpha) + " − 1)";
    return "max(" + a + " x − τ, 0)^(1/" + a + ")";
  }
  std::string operator()(TopK w) const {
    const std::string k = std::to_string(w.k);
    return w.renormalise ? "softmax of the " + k + " largest x, 0 elsewhere"
                         : "softmax(x) at the " + k + " largest x, 0 elsewhere";
  }
  std::string operator()(SelfAdjusted) const { return "softmax(x) · (x − low) / (high − low)"; }
};

struct MaskText {
  std::string operator()(Full) const { return "all s"; }
  std::string operator()(Causal) const { return "s ≤ t"; }
  std::string operator()(Window m) const { return "t − " + std::to_string(m.size) + " < s ≤ t"; }
};

struct DecayText {
  std::string operator()(NoDecay) const { return ""; }
  std::string operator()(TokenGate) const { return " · ∏ g"; }
  std::string operator()(HeadSlope) const { return " · exp(−λ (t − s))"; }
};

struct ValuesText {
  std::string operator()(AsGiven) const { return "v"; }
  std::string operator()(CountPower) const { return "v / nₛ^σ(m)"; }
};

struct DenominatorText {
  std::string operator()(Sum z) const {
    const std::string W = z.plus == 0 ? "Σ w" : decimal(z.plus) + " + Σ w";
    const std::string floor = z.floor == 0 ? "" : decimal(z.floor) + " n, ";
    const std::string bounds = (z.least == 0 ? "" : decimal(z.least) + ", ") + floor;
    if (!bounds.empty()) return outside(z, "max(" + bounds + W + ")");
    return z.plus == 0 || z.detach ? outside(z, W) : "(" + W + ")";
  }
  std::string operator()(Count) const { return "n"; }
  std::string operator()(CumulativeGate z) const {
    const std::string sum = z.least == 0 ? "Σ exp(c)" : "max(" + decimal(z.least) + ", Σ exp(c))";
    return z.times_count ? "(n · " + sum + ")" : sum;
  }
  std::string operator()(Nothing) const { return ""; }

  static std::string outside(Sum z, const std::string& inner) {
    return z.detach ? "stopgrad(" + inner + ")" : inner;
  }
};

struct NormText {
  std::string y;

  std::string operator()(NoNorm) const { return y; }
  std::string operator()(L2 n) const { return (n.times_dim ? "E · L2( " : "L2( ") + y + " )"; }
  std::string operator()(Rms) const { return "RMSNorm( " + y + " )"; }
  std::string operator()(Layer) const { return "LayerNorm( " + y + " )"; }
};

}  // namespace horner::attn

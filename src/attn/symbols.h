// The formula of every alternative of every stage, for formula.cpp.
#pragma once

#include <string>

#include "attn/spec.h"

namespace horner::attn {

// The letters are explained in formula.cpp, where these two are defined.
std::string decimal(double);  // "5", "0.5", "−3", "10⁻⁸", "2·10⁻⁸"
std::string term(int n);      // "x³/3!"

struct ProductText {
  std::string operator()(Identity) const { return "q·k"; }
  std::string operator()(Elu1) const { return "(elu(q) + 1)·(elu(k) + 1)"; }
  std::string operator()(Relu) const { return "relu(q)·relu(k)"; }
  std::string operator()(Cosine f) const {
    return f.over_heads ? "(q/ℓ)·(k/ℓ)" : "(q/|q|)·(k/|k|)";
  }
  std::string operator()(Project) const { return "(P q)·(R k)"; }
  std::string operator()(Hedgehog) const { return "f(P q)·f(R k)"; }
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
    if (w.alpha == 1.5) return "max(x/2 − τ, 0)²";
    const std::string a = "(" + decimal(w.alpha) + " − 1)";
    return "max(" + a + " x − τ, 0)^(1/" + a + ")";
  }
  std::string operator()(TopK w) const {
    const std::string k = std::to_string(w.k);
    return w.renormalise ? "softmax of the " + k + " largest x, 0 elsewhere"
                         : "softmax(x) at the " + k + " largest x, 0 elsewhere";
  }
  std::string operator()(SelfAdjusted) const { return "softmax(x) · (x − low) / (high − low)"; }
  std::string operator()(Softpick) const { return "max(exp(x) − 1, 0)"; }
  std::string operator()(StickBreaking) const { return "σ(x) · ∏ (1 − σ(x′))"; }
};

struct MaskText {
  std::string operator()(Full) const { return "all s"; }
  std::string operator()(Causal) const { return "s ≤ t"; }
  std::string operator()(Window m) const {
    return "t − " + std::to_string(m.size) + " < s ≤ t" +
           (m.ahead > 0 ? " + " + std::to_string(m.ahead) : "");
  }
  std::string operator()(Chunks m) const {
    const std::string size = std::to_string(m.size);
    return "s ≤ t, ⌊s/" + size + "⌋ = ⌊t/" + size + "⌋";
  }
  std::string operator()(Streaming m) const {
    return "s < " + std::to_string(m.first) + " or " + (*this)(Window{m.size});
  }
  std::string operator()(Prefix) const { return "s ≤ t or s < p"; }
};

struct DecayText {
  std::string operator()(NoDecay) const { return ""; }
  std::string operator()(TokenGate) const { return " · ∏ g"; }
  std::string operator()(HeadSlope) const { return " · exp(−λ (t − s))"; }
  std::string operator()(ChannelGate) const { return ""; }  // in the product
};

struct ValuesText {
  std::string operator()(AsGiven) const { return "v"; }
  std::string operator()(CountPower) const { return "v / nₛ^σ(m)"; }
  std::string operator()(Delta) const { return "u"; }
};

struct DenominatorText {
  std::string sum = "Σ w";  // W
  std::string count = "n";  // of the floor

  std::string operator()(Sum z) const {
    std::string W = z.plus == 0 ? sum : decimal(z.plus) + " + " + sum;
    if (z.sink) W = "exp(sink) + " + W;
    const std::string floor = z.floor == 0 ? "" : decimal(z.floor) + " " + count + ", ";
    const std::string bounds = (z.least == 0 ? "" : decimal(z.least) + ", ") + floor;
    if (!bounds.empty()) return outside(z, "max(" + bounds + W + ")");
    return (z.plus == 0 && !z.sink) || z.detach ? outside(z, W) : "(" + W + ")";
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

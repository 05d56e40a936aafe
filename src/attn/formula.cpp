#include "attn/formula.h"

#include <charconv>

namespace horner::attn {

static std::string superscript(int n) {
  static constexpr const char* kDigits[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string out;
  for (char c : std::to_string(n)) out += c == '-' ? "⁻" : kDigits[c - '0'];
  return out;
}

// "5", "0.5", "−3", "10⁻⁸", "2·10⁻⁸"
static std::string number(float x) {
  char buffer[64];
  std::string s(buffer, std::to_chars(buffer, buffer + 64, x).ptr);
  if (const size_t e = s.find('e'); e != std::string::npos) {
    const std::string power = "10" + superscript(std::stoi(s.substr(e + 1)));
    s = s.substr(0, e) == "1" ? power : s.substr(0, e) + "·" + power;
  }
  return s.starts_with('-') ? "−" + s.substr(1) : s;
}

// x³/3!
static std::string term(int n) {
  if (n < 2) return n == 0 ? "1" : "x";
  return "x" + superscript(n) + "/" + std::to_string(n) + "!";
}

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

static std::string score(const Spec& s) {
  const auto* fixed = std::get_if<Fixed>(&s.scale);
  const auto* projected = std::get_if<Project>(&s.features);
  std::string x = std::visit(SharpnessText{}, s.sharpness);
  if (fixed && fixed->factor != 1) x += number(fixed->factor) + " ";
  x += std::visit(ProductText{}, s.features);
  const std::string root = projected ? "√" + std::to_string(projected->dim) : "√D";
  const std::string heat = s.temperature == 1 ? "" : number(s.temperature);
  if (fixed)
    x += heat.empty() ? "" : " / " + heat;
  else
    x += heat.empty() ? " / " + root : " / (" + heat + " " + root + ")";
  if (s.centred) x += " − mean of the row";
  return "x = " + (s.clamp == kNoClamp ? x : "min(" + number(s.clamp) + ", " + x + ")");
}

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
    const std::string a = "(" + number(w.alpha) + " − 1)";
    return "max(" + a + " x − τ, 0)^(1/" + a + ")";
  }
  std::string operator()(TopK w) const {
    const std::string k = std::to_string(w.k);
    return w.renormalise ? "softmax of the " + k + " largest x, 0 elsewhere"
                         : "softmax(x) at the " + k + " largest x, 0 elsewhere";
  }
  std::string operator()(SelfAdjusted) const { return "softmax(x) · (x − low) / (high − low)"; }
};

static std::string weight(const Spec& s) {
  const std::string w = std::visit(WeightText{}, s.weight);
  if (is<NoDecay>(s.decay)) return w;
  return (is<Taylor>(s.weight) || is<TopK>(s.weight) ? "(" + w + ")" : w) + " · ∏ g";
}

struct MaskText {
  std::string operator()(Full) const { return "all s"; }
  std::string operator()(Causal) const { return "s ≤ t"; }
  std::string operator()(Window m) const { return "t − " + std::to_string(m.size) + " < s ≤ t"; }
};

struct DenominatorText {
  std::string operator()(Sum z) const {
    const std::string W = z.plus == 0 ? "Σ w" : number(z.plus) + " + Σ w";
    if (z.least != 0) return outside(z, "max(" + number(z.least) + ", " + W + ")");
    return z.plus == 0 || z.detach ? outside(z, W) : "(" + W + ")";
  }
  std::string operator()(Count) const { return "n"; }
  std::string operator()(CountPower) const { return "n^σ(m)"; }
  std::string operator()(CumulativeGate z) const {
    const std::string sum = z.least == 0 ? "Σ exp(c)" : "max(" + number(z.least) + ", Σ exp(c))";
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

static std::string result(const Spec& s) {
  std::string y = s.input_gate ? "Σ w in v" : "Σ w v";
  const std::string Z = std::visit(DenominatorText{}, s.denominator);
  if (!Z.empty()) y += " / " + Z;
  if (s.output_gate) y = "out · " + y;
  y = std::visit(NormText{y}, s.norm);
  return "o = " + (s.post_gate ? "post · " + y : y);
}

// What the letters stand for.
static std::vector<std::string> explanations(const Spec& s) {
  const auto* gates = std::get_if<CumulativeGate>(&s.denominator);
  const auto* cosine = std::get_if<Cosine>(&s.features);
  const auto* rms = std::get_if<Rms>(&s.norm);
  const auto* layer = std::get_if<Layer>(&s.norm);
  const bool counted = is<Count>(s.denominator) || is<CountPower>(s.denominator) ||
                       (gates && gates->times_count) || is<LogLength>(s.sharpness) ||
                       is<LogPower>(s.sharpness);
  std::vector<std::string> out;
  auto say = [&](bool wanted, const std::string& line) {
    if (wanted) out.push_back(line);
  };
  say(cosine && cosine->over_heads, "ℓ = each channel's length over the heads of the token");
  say(is<Project>(s.features), "P, R = the query and key projections, learned for each head");
  say(is<LogLength>(s.sharpness), "a = length_scale, learned for each head");
  say(is<LogPower>(s.sharpness), "δ, β, γ = log_power, learned for each head");
  say(is<Adaptive>(s.sharpness),
      "θ ≥ 1 grows with the entropy of the row's softmax, without gradient");
  say(is<Entmax>(s.weight), "τ such that Σ w = 1");
  say(is<SelfAdjusted>(s.weight), "low = min(0, least x of the row), high = max(0, largest)");
  say(is<TokenGate>(s.decay), "g = exp(decay), the gate of each token after s, up to t");
  say(counted, "n = number of keys seen");
  say(is<CountPower>(s.denominator), "m = count_exponent, learned for each head; σ = sigmoid");
  say(gates, "c = denominator_gate, one for each token");
  say(s.input_gate, "in = input_gate of token s, in (0, 1)");
  say(s.output_gate, "out = output_gate of token t, in (0, 1)");
  say(is<L2>(s.norm), "L2(y) = y / |y|");
  say(rms, "RMSNorm(y) = weight · y / √(mean y² + " + number(rms ? rms->eps : 0) + ")");
  say(layer, "LayerNorm(y) = weight · (y − mean y) / √(var y + " + number(layer ? layer->eps : 0) +
                 ") + bias");
  say(s.post_gate, "post = post_gate of token t, in (0, 1)");
  return out;
}

std::vector<std::pair<std::string, std::string>> formula(const Spec& s) {
  std::vector<std::pair<std::string, std::string>> lines = {
      {"score", score(s)},
      {"weight", "w = " + weight(s)},
      {"seen", std::visit(MaskText{}, s.mask)},
      {"result", result(s)},
  };
  for (const std::string& line : explanations(s)) lines.emplace_back("where", line);
  return lines;
}

}  // namespace horner::attn

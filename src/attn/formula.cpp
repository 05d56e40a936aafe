#include "attn/formula.h"

#include <charconv>

#include "attn/symbols.h"

namespace horner::attn {

static std::string superscript(int n) {
  static constexpr const char* kDigits[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string out;
  for (char c : std::to_string(n)) out += c == '-' ? "⁻" : kDigits[c - '0'];
  return out;
}

std::string decimal(double x) {
  char buffer[64];
  std::string s(buffer, std::to_chars(buffer, buffer + 64, float(x)).ptr);  // 8 digits at most
  if (const size_t e = s.find('e'); e != std::string::npos) {
    const std::string power = "10" + superscript(std::stoi(s.substr(e + 1)));
    s = s.substr(0, e) == "1" ? power : s.substr(0, e) + "·" + power;
  }
  return s.starts_with('-') ? "−" + s.substr(1) : s;
}

std::string term(int n) {
  if (n < 2) return n == 0 ? "1" : "x";
  return "x" + superscript(n) + "/" + std::to_string(n) + "!";
}

// The score before the mean is subtracted.
static std::string uncentred(const Spec& s) {
  const auto* fixed = std::get_if<Fixed>(&s.scale);
  const auto* hedgehog = std::get_if<Hedgehog>(&s.features);
  const auto* projected = std::get_if<Project>(&s.features);
  std::string x = std::visit(SharpnessText{}, s.sharpness);
  if (fixed && fixed->factor != 1) x += decimal(fixed->factor) + " ";
  const std::string product = std::visit(ProductText{}, s.features);
  x += is<ChannelGate>(s.decay) ? product + " (∏ g in each channel)" : product;
  std::string root = projected ? "√" + std::to_string(projected->dim) : "√D";
  if (hedgehog) root = "√" + std::to_string(2 * hedgehog->dim);
  const std::string heat = s.temperature == 1 ? "" : decimal(s.temperature);
  if (fixed)
    x += heat.empty() ? "" : " / " + heat;
  else
    x += heat.empty() ? " / " + root : " / (" + heat + " " + root + ")";
  if (s.softcap != 0) x = decimal(s.softcap) + " tanh(" + x + " / " + decimal(s.softcap) + ")";
  return s.bias ? x + " + bias" : x;
}

static std::string score(const Spec& s) {
  std::string x = uncentred(s);
  if (s.centred) x += is<NoKeys>(s.near) ? " − mean of the row" : " − μ";
  if (s.less_log_count) x += " − log(n)";
  return "x = " + (s.clamp == kNoClamp ? x : "min(" + decimal(s.clamp) + ", " + x + ")");
}

static std::string weight(const Spec& s) {
  const std::string w = std::visit(WeightText{}, s.weight);
  const std::string decay = std::visit(DecayText{}, s.decay);
  const bool joined = !decay.empty() && (is<Taylor>(s.weight) || is<TopK>(s.weight));
  const std::string far = (joined ? "(" + w + ")" : w) + decay;
  const auto* near = std::get_if<Window>(&s.near);
  if (!near) return far;
  const std::string own = s.centred ? "q·k / √D − μ" : "q·k / √D";
  const std::string x = is<Identity>(s.features) ? "x" : own;
  const std::string exact = s.near_share ? "σ(share) exp(" + x + " − top)" : "exp(" + x + ")";
  return exact + decay + " where s > t − " + std::to_string(near->size) + ", else " + far;
}

static std::string result(const Spec& s) {
  std::string y = std::string(s.input_gate ? "Σ w in " : "Σ w ") + (s.dropout != 0 ? "kept " : "") +
                  std::visit(ValuesText{}, s.values);
  if (!is<AsGiven>(s.values) && !is<Nothing>(s.denominator)) y = "(" + y + ")";
  const std::string sum = is<Softpick>(s.weight) ? "Σ |exp(x) − 1|" : "Σ w";
  const std::string count = is<NoKeys>(s.near) ? "n" : "n′";
  const std::string Z = std::visit(DenominatorText{sum, count}, s.denominator);
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
  const auto* sum = std::get_if<Sum>(&s.denominator);
  const auto* near = std::get_if<Window>(&s.near);
  const bool floored = sum && sum->floor != 0;
  const bool counted = is<Count>(s.denominator) || (gates && gates->times_count) ||
                       (floored && !near) || s.less_log_count || is<LogLength>(s.sharpness) ||
                       is<LogPower>(s.sharpness);
  const std::string each = s.channel_gates ? ", of each channel" : "";
  std::vector<std::string> out;
  auto say = [&](bool wanted, const std::string& line) {
    if (wanted) out.push_back(line);
  };
  say(cosine && cosine->over_heads, "ℓ = each channel's length over the heads of the token");
  say(is<Hedgehog>(s.features), "f(y) = [softmax(y), softmax(−y)]");
  say(is<Project>(s.features) || is<Hedgehog>(s.features),
      "P, R = the query and key projections, learned for each head");
  say(is<LogLength>(s.sharpness), "a = length_scale, learned for each head");
  say(is<LogPower>(s.sharpness), "δ, β, γ = log_power, learned for each head");
  say(is<Adaptive>(s.sharpness),
      "θ ≥ 1 grows with the entropy of the row's softmax, without gradient");
  say(is<Entmax>(s.weight), "τ such that Σ w = 1");
  say(is<SelfAdjusted>(s.weight), "low = min(0, least x of the row), high = max(0, largest)");
  say(is<StickBreaking>(s.weight), "∏ over the keys after s that t sees, x′ their scores");
  say(s.bias, "bias = one number for each query and key");
  say(is<Prefix>(s.mask), "p = prefix, the keys that all queries of a sequence see");
  const std::string corrects = is<Delta>(s.values) ? "; in w(kₛ·kᵣ): after r, up to s" : "";
  say(is<ChannelGate>(s.decay), "g = exp(channel_decay) of each token after s, up to t" + corrects);
  say(is<TokenGate>(s.decay), "g = exp(decay), the gate of each token after s, up to t" + corrects);
  say(is<HeadSlope>(s.decay), "λ = slope, one constant for each key head");
  say(counted, "n = number of keys seen");
  const std::string far = "the keys s ≤ t − " + std::to_string(near ? near->size : 0);
  say(near && s.centred, "μ = mean of " + uncentred(s) + " over " + far + "; 0 without any");
  say(near && floored, "n′ = number of " + far);
  say(s.near_share, "share = near_share, learned for each head; σ = sigmoid");
  say(s.near_share, "top = the row's largest score of a near key");
  say(is<CountPower>(s.values), "nₛ = number of keys that position s sees");
  say(is<CountPower>(s.values), "m = count_exponent, learned for each key head; σ = sigmoid");
  if (const auto* delta = std::get_if<Delta>(&s.values)) {
    const std::string beta = delta->most == 1 ? "β" : decimal(delta->most) + " β";
    out.push_back("uₛ = " + beta + " / w(kₛ·kₛ) · (v − Σ w(kₛ·kᵣ) u over the keys r < s)");
    out.push_back("β = beta of token s, in (0, 1)");
  }
  say(s.dropout != 0, "kept = 0 with probability " + decimal(s.dropout) + ", else " +
                          decimal(1 / (1 - s.dropout)) + ", from a seed");
  say(sum && sum->sink, "sink = one learned number for each head");
  say(gates, "c = denominator_gate, one for each token");
  say(s.input_gate, "in = input_gate of token s, in (0, 1)");
  say(s.output_gate, "out = output_gate of token t, in (0, 1)" + each);
  say(is<L2>(s.norm), "L2(y) = y / |y|");
  say(rms, "RMSNorm(y) = weight · y / √(mean y² + " + decimal(rms ? rms->eps : 0) + ")");
  say(layer, "LayerNorm(y) = weight · (y − mean y) / √(var y + " + decimal(layer ? layer->eps : 0) +
                 ") + bias");
  say(s.post_gate, "post = post_gate of token t, in (0, 1)" + each);
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

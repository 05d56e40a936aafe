#include "attn/spec_text.h"

#include <charconv>
#include <utility>
#include <vector>

#include "attn/plan.h"
#include "attn/words.h"
#include "core/check.h"
#include "core/names.h"

namespace horner::attn {

// Every stage, in the order of spec.h.
template <class V>
static void stages(Spec& s, V&& v) {
  v("features", s.features);
  v("scale", s.scale);
  v("temperature", Parameter<double>{"temperature", s.temperature, 1e-6, 1e6});
  v("sharpness", s.sharpness);
  v("softcap", Parameter<double>{"softcap", s.softcap, 0, 1e6});
  v("bias", flag("bias", s.bias));
  v("centred", flag("centred", s.centred));
  v("less_log_count", flag("less_log_count", s.less_log_count));
  v("clamp", Parameter<double>{"clamp", s.clamp, -1e6, kNoClamp});
  v("weight", s.weight);
  v("near", s.near);
  v("near_share", flag("near_share", s.near_share));
  v("mask", s.mask);
  v("decay", s.decay);
  v("dropout", Parameter<double>{"dropout", s.dropout, 0, 0.999});
  v("input_gate", flag("input_gate", s.input_gate));
  v("values", s.values);
  v("denominator", s.denominator);
  v("output_gate", flag("output_gate", s.output_gate));
  v("norm", s.norm);
  v("post_gate", flag("post_gate", s.post_gate));
  v("channel_gates", flag("channel_gates", s.channel_gates));
}

// Printing.

static std::string number(double x) {
  char buffer[64];
  return {buffer, std::to_chars(buffer, buffer + 64, x).ptr};
}
static std::string print(const Parameter<bool>& p) {
  return p.value ? p.name : "no_" + std::string(p.name);
}
template <class T>
static std::string print(const Parameter<T>& p) {
  return p.name + ("=" + number(double(p.value)));
}

// "taylor(order=4)": the name, and the parameters that are not at their defaults.
template <class... Ts>
static std::string print(std::variant<Ts...>& stage) {
  std::string name;
  std::vector<std::string> values, defaults;
  auto into = [&](std::vector<std::string>& list) {
    return [&](const char* its_name, const auto&... p) {
      name = its_name;
      list = std::vector<std::string>{print(p)...};
    };
  };
  std::visit(
      [&](auto& alternative) {
        std::decay_t<decltype(alternative)> standard;
        describe(standard, into(defaults));
        describe(alternative, into(values));
      },
      stage);
  std::string arguments;
  for (size_t i = 0; i < values.size(); ++i)
    if (values[i] != defaults[i]) arguments += (arguments.empty() ? "" : ",") + values[i];
  return arguments.empty() ? name : name + "(" + arguments + ")";
}

std::string text(const Spec& given) {
  Spec spec = given, softmax;
  std::vector<std::string> all, plain;
  auto line = [](std::vector<std::string>& lines) {
    return [&lines](const char* name, auto&& stage) {
      constexpr bool is_parameter = requires { stage.value; };
      lines.push_back(is_parameter ? print(stage) : std::string(name) + "=" + print(stage));
    };
  };
  stages(spec, line(all));
  stages(softmax, line(plain));
  std::string out;
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i] != plain[i]) out += (out.empty() ? "" : ",") + all[i];
  return out;
}

// Parsing.

// "a,b(c,d),e" at the commas outside parentheses.
static std::vector<std::string_view> split(std::string_view s) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= s.size(); ++i) {
    if (i < s.size() && s[i] == '(') ++depth;
    if (i < s.size() && s[i] == ')') --depth;
    if (i < s.size() && (s[i] != ',' || depth > 0)) continue;
    if (i > begin) parts.push_back(s.substr(begin, i - begin));
    begin = i + 1;
  }
  check(depth == 0, "parentheses do not match in '", s, "'");
  return parts;
}

// "key=value" in two; the value of "key" alone is empty.
static std::pair<std::string_view, std::string_view> halves(std::string_view s) {
  const size_t at = s.find('='), open = s.find('(');
  if (at == std::string_view::npos || open < at) return {s, {}};
  return {s.substr(0, at), s.substr(at + 1)};
}

template <class T>
static void check_range(const Parameter<T>& p) {
  if (p.value >= T(p.least) && p.value <= T(p.most)) return;
  fail(p.name, " must be ", number(p.least), " to ", number(p.most), ", not ", double(p.value));
}

static void parse(std::string_view value, const Parameter<bool>& p) {
  check(value == "yes" || value == "no", p.name, " must be yes or no, not '", value, "'");
  p.value = value == "yes";
}
template <class T>
static void parse(std::string_view value, const Parameter<T>& p) {
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), p.value);
  check(error == std::errc() && end == value.data() + value.size(), p.name, " must be a number",
        std::is_same_v<T, int> ? " without a fraction" : "", ", not '", value, "'");
  check_range(p);
}

// One argument in parentheses: "order=4", or "4" in the place of that parameter, or "detach".
template <class P>
static bool take(std::string_view argument, const P& p, bool in_place) {
  const auto [key, value] = halves(argument);
  const bool is_flag = std::is_same_v<P, Parameter<bool>>;
  if (key == p.name) return parse(is_flag && value.empty() ? "yes" : value, p), true;
  if (is_flag && key.starts_with("no_") && key.substr(3) == p.name) return parse("no", p), true;
  const bool is_number = key.find_first_of("0123456789") <= 1 || key == "inf";
  if (!is_flag && in_place && value.empty() && is_number) return parse(key, p), true;
  return false;
}

// One stage whose value is one of several alternatives.
template <class... Ts>
static void parse(const char* stage_name, std::string_view value, std::variant<Ts...>& stage) {
  const size_t open = value.find('(');
  const std::string_view name = value.substr(0, open);
  std::string_view arguments;
  if (open != std::string_view::npos) {
    check(value.ends_with(')'), stage_name, ": '", value, "' lacks a closing parenthesis");
    arguments = value.substr(open + 1, value.size() - open - 2);
  }
  std::vector<std::string> names;
  bool found = false;
  auto attempt = [&](auto alternative) {
    describe(alternative, [&](const char* its_name, const auto&... p) {
      names.push_back(its_name);
      if (name != its_name) return;
      found = true;
      size_t place = 0;  // of the argument: a number without a name is the parameter there
      for (std::string_view argument : split(arguments)) {
        [[maybe_unused]] size_t at = 0;
        bool taken = false;
        ((taken = taken || take(argument, p, at++ == place)), ...);
        ++place;
        std::vector<std::string> known{p.name...};
        check(taken, name, " takes ", known.empty() ? "no parameter" : quoted(known), ", not '",
              argument, "'");
      }
    });
    if (found && names.back() == name) stage = alternative;
  };
  (attempt(Ts{}), ...);
  check(found, "no ", stage_name, " '", name, "'; possible: ", quoted(names));
}
template <class T>
static void parse(const char*, std::string_view value, Parameter<T> p) {
  parse(std::is_same_v<T, bool> && value.empty() ? "yes" : value, p);
}

Spec with(Spec spec, std::string_view changes) {
  for (std::string_view change : split(changes)) {
    auto [key, value] = halves(change);
    bool found = false;
    std::vector<std::string> names;
    stages(spec, [&](const char* name, auto&& stage) {
      names.push_back(name);
      const bool off = key.starts_with("no_") && key.substr(3) == name;
      if (key != name && !off) return;
      found = true;
      parse(name, off ? "no" : value, stage);
    });
    check(found, "no stage '", key, "' of an attention variant; the stages are ", quoted(names));
  }
  return spec;
}

// Stages that need each other, or exclude each other.
static void check_together(const Spec& s) {
  const WeightFacts weight = facts(s.weight);
  const auto* power = std::get_if<Power>(&s.weight);
  const auto* near = std::get_if<Window>(&s.near);
  const bool projected = is<Project>(s.features) || is<Hedgehog>(s.features);
  check(!s.less_log_count || !needs_the_row(s),
        "less_log_count requires weights that depend on one score only");
  check(is<NoDecay>(s.decay) || !sees_future(s.mask),
        "decay depends on the distance to a past key: it requires a mask that sees no later keys");
  check(!is<ChannelGate>(s.decay) ||
            (power && power->degree == 1 && !projected && s.softcap == 0 && s.clamp == kNoClamp),
        "decay=channel_gate requires weight=power(1) of the products themselves: no projection, "
        "softcap or clamp");
  check(!is<ChannelGate>(s.decay) || (!s.centred && !s.less_log_count && !s.bias),
        "decay=channel_gate does not support centred, less_log_count or bias");
  check(!near ||
            (weight.orders && is<Causal>(s.mask) && near->ahead == 0 && !is<ChannelGate>(s.decay)),
        "near=window(n) requires a weight with a finite state (taylor, power) and a causal mask");
  check(!near || (!s.less_log_count && !s.bias && s.softcap == 0 && s.clamp == kNoClamp &&
                  is<Flat>(s.sharpness)),
        "near=window(n) requires plain or centred scores: no less_log_count, bias, softcap, clamp "
        "or sharpness");
  check(near || !s.near_share, "near_share requires near=window(n), whose keys it weighs");
  check(!is<Delta>(s.values) || (weight.of_one_score && is<Causal>(s.mask) && !near && !s.bias),
        "values=delta requires a weight that depends on one score only, and a causal mask; it "
        "does not support near or bias");
  check(!is<Delta>(s.values) || (!s.centred && !s.less_log_count && is<Flat>(s.sharpness)),
        "values=delta does not support centred, less_log_count or a sharpness: its keys meet each "
        "other as queries meet them");
  check(!is<CountPower>(s.values) || (is_interval(s.mask) && reach(s.mask).chunk == 0),
        "values=count_power requires a full, causal or window mask");
  check(!s.channel_gates || s.output_gate || s.post_gate,
        "channel_gates requires output_gate or post_gate");
}

void check_spec(const Spec& given) {
  Spec spec = given;
  auto check_alternative = [](const char*, const auto&... p) { (check_range(p), ...); };
  stages(spec, [&](const char*, auto&& stage) {
    if constexpr (requires { stage.value; })
      check_range(stage);
    else
      std::visit([&](auto& alternative) { describe(alternative, check_alternative); }, stage);
  });
  check_together(spec);
}

}  // namespace horner::attn

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
  v("temperature", Parameter<float>{"temperature", s.temperature, 1e-6, 1e6});
  v("sharpness", s.sharpness);
  v("centred", flag("centred", s.centred));
  v("less_log_count", flag("less_log_count", s.less_log_count));
  v("clamp", Parameter<float>{"clamp", s.clamp, -1e6, kNoClamp});
  v("weight", s.weight);
  v("mask", s.mask);
  v("decay", s.decay);
  v("input_gate", flag("input_gate", s.input_gate));
  v("values", s.values);
  v("denominator", s.denominator);
  v("output_gate", flag("output_gate", s.output_gate));
  v("norm", s.norm);
  v("post_gate", flag("post_gate", s.post_gate));
}

// Printing.

static std::string number(double x, bool single) {
  char buffer[64];
  const auto end = single ? std::to_chars(buffer, buffer + 64, float(x)).ptr
                          : std::to_chars(buffer, buffer + 64, x).ptr;
  return {buffer, end};
}
static std::string print(const Parameter<bool>& p) {
  return p.value ? p.name : "no_" + std::string(p.name);
}
template <class T>
static std::string print(const Parameter<T>& p) {
  return p.name + ("=" + number(p.value, std::is_same_v<T, float>));
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
  fail(p.name, " must be ", number(p.least, false), " to ", number(p.most, false), ", not ",
       double(p.value));
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

// One argument in parentheses: "order=4", or "4" where there is one number, or "detach".
template <class P>
static bool take(std::string_view argument, const P& p, bool first) {
  const auto [key, value] = halves(argument);
  const bool is_flag = std::is_same_v<P, Parameter<bool>>;
  if (key == p.name) return parse(is_flag && value.empty() ? "yes" : value, p), true;
  if (is_flag && key.starts_with("no_") && key.substr(3) == p.name) return parse("no", p), true;
  const bool is_number = key.find_first_of("0123456789") <= 1 || key == "inf";
  if (!is_flag && first && value.empty() && is_number) return parse(key, p), true;
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
      for (std::string_view argument : split(arguments)) {
        bool first = true, taken = false;
        ((taken = taken || take(argument, p, std::exchange(first, false))), ...);
        std::vector<std::string> known{p.name...};
        check(taken, name, " takes ", known.empty() ? "no parameter" : quoted(known), ", not '",
              argument, "'");
        (void)first;
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

void check_spec(const Spec& given) {
  Spec spec = given;
  auto check_alternative = [](const char*, const auto&... p) { (check_range(p), ...); };
  stages(spec, [&](const char*, auto&& stage) {
    if constexpr (requires { stage.value; })
      check_range(stage);
    else
      std::visit([&](auto& alternative) { describe(alternative, check_alternative); }, stage);
  });
  check(!spec.less_log_count || !needs_the_row(spec),
        "less_log_count requires weights that depend on one score only");
}

}  // namespace horner::attn

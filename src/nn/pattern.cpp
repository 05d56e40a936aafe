#include "nn/pattern.h"

#include <algorithm>
#include <charconv>

#include "attn/catalog.h"
#include "core/check.h"

namespace horner::nn {

static constexpr int64_t kMostLayers = 10000;

// The text with blanks for what is in parentheses, where no mark counts: "fixed(1e+2)+l2" becomes
// "fixed(    )+l2".
static std::string outside(std::string text) {
  int depth = 0;
  for (char& c : text) {
    const int before = depth;
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    if (before > 0 && depth > 0) c = ' ';
  }
  return text;
}

// "a,b(c,d),e" at the commas, or another separator, outside parentheses.
static std::vector<std::string> pieces(const std::string& text, char separator = ',') {
  const std::string marks = outside(text);
  std::vector<std::string> out;
  size_t from = 0;
  for (size_t at; (at = marks.find(separator, from)) != marks.npos; from = at + 1)
    out.push_back(text.substr(from, at - from));
  out.push_back(text.substr(from));
  return out;
}

static bool is_variant(const std::string& name) {
  try {
    attn::find(name);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Whether a piece after a variant with changes is one more of them: "norm=l2", or a word such as
// "post_gate", which no variant is called.
static bool is_change(const std::string& piece) {
  const std::string first = piece.substr(0, outside(piece).find_first_of("*|^+"));
  if (first.find(':') != first.npos) return false;
  return first.find('=') != first.npos || !is_variant(first);
}

// Whether the last variant of an item has changes, to which more may be added.
static bool has_changes(const std::string& item) {
  const size_t from = outside(item).find_last_of("|+");
  return item.find(':', from == item.npos ? 0 : from) != item.npos;
}

// The n of "item<mark>n", 1 where there is no mark, which is removed.
static int64_t repeats_of(std::string& item, char mark, const std::string& text, const char* what) {
  const size_t at = outside(item).rfind(mark);
  if (at == item.npos) return 1;
  int64_t n = 0;
  const char *from = item.data() + at + 1, *to = item.data() + item.size();
  const auto [end, error] = std::from_chars(from, to, n);
  check(error == std::errc() && end == to && n >= 1 && n <= kMostLayers, "pattern '", text,
        "': the number of ", what, " in '", item, "' must be 1 to ", kMostLayers);
  item.resize(at);
  return n;
}

// "linear_decay*3" three times into `out`.
static void repeat(std::string item, const std::string& text, std::vector<std::string>& out) {
  const int64_t n = repeats_of(item, '*', text, "layers");
  check(!item.empty(), "pattern '", text,
        "': a variant is missing; a pattern looks like 'linear_decay*3,softmax'");
  out.insert(out.end(), size_t(n), item);
}

std::vector<std::vector<std::string>> variants_of_heads(const std::string& layer, int64_t H) {
  std::vector<std::vector<std::string>> out;
  const std::vector<std::string> forms = pieces(layer, '|');
  for (std::string form : forms) {
    const int64_t n = forms.size() == 1 && outside(form).find('^') == form.npos
                          ? H
                          : repeats_of(form, '^', layer, "heads");
    out.insert(out.end(), size_t(n), pieces(form, '+'));
    for (const std::string& variant : out.back())
      check(!variant.empty(), "pattern '", layer,
            "': a variant is missing; heads look like 'softmax^2|lolcats'");
  }
  check(int64_t(out.size()) == H, "pattern '", layer, "' has ", out.size(),
        " heads, but a layer of the model has ", H);
  return out;
}

std::string heads_text(const std::vector<std::string>& forms) {
  std::string out;
  for (size_t i = 0; i < forms.size();) {
    size_t n = 1;
    while (i + n < forms.size() && forms[i + n] == forms[i]) ++n;
    if (n == forms.size()) return forms[0];
    out += (out.empty() ? "" : "|") + forms[i] + (n > 1 ? "^" + std::to_string(n) : "");
    i += n;
  }
  return out;
}

std::vector<std::string> pattern(const files::Json& given) {
  check(given.is_string() || (given.is_array() && !given.empty()),
        "the attention must be a variant, a pattern such as 'linear_decay*3,softmax', or a list of "
        "variants, got ",
        given.dump());
  std::vector<std::string> out;
  if (given.is_array()) {
    for (const files::Json& each : given) {
      check(each.is_string(), "a list of variants must have texts, got ", each.dump());
      for (const std::string& variant : pattern(each)) out.push_back(variant);
    }
    return out;
  }
  const auto text = given.get<std::string>();
  check(!text.starts_with('['), "the attention '", text,
        "' is a JSON list, which only a file can have; separate the variants by commas instead, as "
        "in 'linear_decay*3,softmax'");
  std::vector<std::string> items;
  for (const std::string& piece : pieces(text))
    if (!items.empty() && has_changes(items.back()) && is_change(piece))
      items.back() += "," + piece;
    else
      items.push_back(piece);
  for (const std::string& item : items) repeat(item, text, out);
  return out;
}

std::vector<std::string> variants_of_layers(const files::Json& given, int64_t layers) {
  const std::vector<std::string> turn = pattern(given);
  check(int64_t(turn.size()) <= layers, "the pattern of variants ", given.dump(), " has ",
        turn.size(), " layers, but the model has ", layers,
        "; a pattern may be shorter than the model, which repeats it, but not longer");
  std::vector<std::string> out;
  for (int64_t i = 0; i < layers; ++i) out.push_back(turn[size_t(i) % turn.size()]);
  return out;
}

std::string pattern_text(const std::vector<std::string>& all) {
  size_t turn = 1;
  const auto repeats = [&] {
    for (size_t i = turn; i < all.size(); ++i)
      if (all[i] != all[i - turn]) return false;
    return true;
  };
  while (turn < all.size() && !repeats()) ++turn;
  std::string out;
  for (size_t i = 0; i < std::min(turn, all.size());) {
    size_t n = 1;
    while (i + n < turn && all[i + n] == all[i]) ++n;
    out += (out.empty() ? "" : ",") + all[i] + (n > 1 ? "*" + std::to_string(n) : "");
    i += n;
  }
  return out;
}

std::string LayersOf::text() const {
  std::string out;
  for (size_t i = 0; i < layers.size();) {
    size_t n = 1;
    while (i + n < layers.size() && layers[i + n] == layers[i] + int64_t(n)) ++n;
    out += (out.empty() ? "" : ", ") + std::to_string(layers[i]) +
           (n > 1 ? "-" + std::to_string(layers[i + n - 1]) : "");
    i += n;
  }
  return out;
}

std::vector<LayersOf> by_variant(const std::vector<std::string>& variants) {
  std::vector<LayersOf> out;
  for (size_t i = 0; i < variants.size(); ++i) {
    auto found = std::ranges::find(out, variants[i], &LayersOf::variant);
    if (found == out.end()) found = out.insert(out.end(), {variants[i], {}});
    found->layers.push_back(int64_t(i));
  }
  return out;
}

}  // namespace horner::nn

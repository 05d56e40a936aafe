// Normalizers. Most text is already in NFC: only the parts that could change are composed.
#include "text/normalize.h"

#include <algorithm>
#include <optional>

#include "text/form.h"
#include "text/utf8.h"

namespace horner::text {

namespace {

size_t nfc_prefix(std::string_view text) {
  size_t at = 0, last = 0;  // the last character may combine with the next
  while (at < text.size()) {
    if (static_cast<unsigned char>(text[at]) < 0x80) {
      last = at++;
      continue;
    }
    const size_t begin = at;
    if (!stable_in_nfc(next(text, at))) return last;
    last = begin;
  }
  return at;
}

// Each returns false if it leaves the text unchanged; otherwise it appends the new text to `out`.
bool apply(const Nfc&, std::string_view text, bool, std::string& out) {
  size_t stable = nfc_prefix(text);
  if (stable == text.size()) return false;
  while (!text.empty()) {
    out += text.substr(0, stable);
    text.remove_prefix(stable);
    // The unstable part ends at the next two ASCII characters: nothing combines across them.
    size_t end = 1;
    while (end < text.size() && (static_cast<unsigned char>(text[end - 1]) >= 0x80 ||
                                 static_cast<unsigned char>(text[end]) >= 0x80))
      ++end;
    append_nfc(text.substr(0, end), out);
    text.remove_prefix(std::min(end, text.size()));
    stable = nfc_prefix(text);
  }
  return true;
}

bool apply(const Replace& r, std::string_view text, bool, std::string& out) {
  const auto find = [&](size_t from) -> std::optional<Range> {
    if (!r.single) return r.pattern.find(text, from);
    const size_t at = text.find(r.single, from);
    if (at == std::string_view::npos) return std::nullopt;
    return Range{at, at + 1};
  };
  std::optional<Range> match = find(0);
  if (!match) return false;
  out.reserve(text.size() + text.size() / 2);
  size_t at = 0;
  for (; match; match = find(at)) {
    out += text.substr(at, match->begin - at);
    out += r.content;
    at = match->end;
  }
  out += text.substr(at);
  return true;
}

bool apply(const Prepend& p, std::string_view text, bool continues, std::string& out) {
  if (text.empty() || continues) return false;
  out += p.content;
  out += text;
  return true;
}

}  // namespace

std::string_view normalized(const std::vector<Normalizer>& steps, std::string_view text,
                            bool continues, std::string& buffer) {
  for (const Normalizer& step : steps) {
    std::string out;
    if (!std::visit([&](const auto& s) { return apply(s, text, continues, out); }, step)) continue;
    buffer = std::move(out);
    text = buffer;
  }
  return text;
}

}  // namespace horner::text

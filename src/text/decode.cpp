// Decoders.
#include "text/decode.h"

#include <array>
#include <charconv>

#include "text/utf8.h"

namespace horner::text {

namespace {

using Parts = std::vector<std::string>;

// The byte for each code point, or -1. Printable bytes stand for themselves; the others are U+0100
// and following, in order.
const std::array<int, 512>& bytes_of_characters() {
  static const auto table = [] {
    std::array<int, 512> out;
    out.fill(-1);
    int others = 256;
    for (int b = 0; b < 256; ++b) {
      const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      out[size_t(printable ? b : others++)] = b;
    }
    return out;
  }();
  return table;
}

void replace_all(std::string& text, std::string_view pattern, std::string_view content) {
  for (size_t at = 0; (at = text.find(pattern, at)) != std::string::npos; at += content.size())
    text.replace(at, pattern.size(), content);
}

void decode_step(const DecodeBytes&, Parts& parts) {
  std::string all;
  for (const std::string& part : parts)
    if (!to_bytes(part, all)) all += part;
  parts = {lossy(all)};
}

void decode_step(const DecodeReplace& r, Parts& parts) {
  for (std::string& part : parts) replace_all(part, r.pattern, r.content);
}

void decode_step(const DecodeFallback&, Parts& parts) {
  Parts out;
  std::string bytes;
  const auto flush = [&] {
    if (valid_size(bytes) == bytes.size())
      out.push_back(bytes);
    else
      out.insert(out.end(), bytes.size(), "\xEF\xBF\xBD");  // U+FFFD for each
    bytes.clear();
  };
  for (std::string& part : parts) {
    if (const int byte = fallback_byte(part); byte >= 0) {
      bytes += char(byte);
      continue;
    }
    if (!bytes.empty()) flush();
    out.push_back(std::move(part));
  }
  if (!bytes.empty()) flush();
  parts = std::move(out);
}

void decode_step(const DecodeFuse&, Parts& parts) {
  std::string all;
  for (const std::string& part : parts) all += part;
  parts = {all};
}

void decode_step(const DecodeStrip& s, Parts& parts) {
  for (std::string& part : parts) {
    std::string_view rest = part;
    for (size_t i = 0; i < s.start && rest.starts_with(s.content); ++i)
      rest.remove_prefix(s.content.size());
    for (size_t i = 0; i < s.stop && rest.ends_with(s.content); ++i)
      rest.remove_suffix(s.content.size());
    part = std::string(rest);
  }
}

void decode_step(const DecodeMetaspace& m, Parts& parts) {
  for (size_t i = 0; i < parts.size(); ++i)
    replace_all(parts[i], m.replacement, i == 0 && m.prepended ? "" : " ");
}

}  // namespace

bool to_bytes(std::string_view text, std::string& out) {
  const size_t before = out.size();
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next(text, at);
    const int byte = c < 512 ? bytes_of_characters()[c] : -1;
    if (byte < 0) return out.resize(before), false;
    out += char(byte);
  }
  return true;
}

int fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int byte = 0;
  const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  return error == std::errc() && end == token.data() + 5 ? byte : -1;
}

std::string decoded(const std::vector<Decoder>& decoders, Parts parts) {
  if (decoders.empty()) {  // joined by spaces
    std::string out;
    for (size_t i = 0; i < parts.size(); ++i) out += (i == 0 ? "" : " ") + parts[i];
    return out;
  }
  for (const Decoder& d : decoders)
    std::visit([&](const auto& step) { decode_step(step, parts); }, d);
  decode_step(DecodeFuse{}, parts);
  return parts[0];
}

}  // namespace horner::text

// UTF-8, by Unicode's table of well-formed sequences.
#include "text/utf8.h"

#include <cstdint>
#include <cstring>

namespace horner::text {

namespace {

struct Sequence {
  size_t size;  // bytes that belong together
  bool valid;
};

// The non-ASCII sequence at `at`, or its longest valid prefix.
Sequence sequence(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  const size_t size = first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
  if (size == 0) return {1, false};
  unsigned char low = 0x80, high = 0xBF;  // of the second byte: no long forms, no surrogates
  if (first == 0xE0) low = 0xA0;
  if (first == 0xED) high = 0x9F;
  if (first == 0xF0) low = 0x90;
  if (first == 0xF4) high = 0x8F;
  for (size_t i = 1; i < size; ++i) {
    if (at + i >= text.size() || byte(at + i) < low || byte(at + i) > high) return {i, false};
    low = 0x80, high = 0xBF;
  }
  return {size, true};
}

}  // namespace

void append(std::string& text, char32_t c) {
  if (c < 0x80) {
    text += char(c);
  } else if (c < 0x800) {
    text += {char(0xC0 | c >> 6), char(0x80 | (c & 0x3F))};
  } else if (c < 0x10000) {
    text += {char(0xE0 | c >> 12), char(0x80 | (c >> 6 & 0x3F)), char(0x80 | (c & 0x3F))};
  } else {
    text += {char(0xF0 | c >> 18), char(0x80 | (c >> 12 & 0x3F)), char(0x80 | (c >> 6 & 0x3F)),
             char(0x80 | (c & 0x3F))};
  }
}

size_t valid_size(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight = 0;
    while (at + 8 <= text.size() &&
           (std::memcpy(&eight, text.data() + at, 8), !(eight & 0x8080808080808080u)))
      at += 8;
    while (at < text.size() && static_cast<unsigned char>(text[at]) < 0x80) ++at;
    while (at < text.size() && static_cast<unsigned char>(text[at]) >= 0x80) {
      const Sequence s = sequence(text, at);
      if (!s.valid) return at;
      at += s.size;
    }
  }
  return at;
}

std::string lossy(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const size_t valid = valid_size(bytes);
    out += bytes.substr(0, valid);
    bytes.remove_prefix(valid);
    if (bytes.empty()) break;
    append(out, 0xFFFD);
    bytes.remove_prefix(sequence(bytes, 0).size);
  }
  return out;
}

}  // namespace horner::text

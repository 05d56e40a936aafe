// UTF-8: decoding, encoding, validation and replacement.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace horner::text {

// Returns the code point at `at` and moves `at` past it. The text must be valid.
inline char32_t next(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return char32_t(static_cast<unsigned char>(text[i])); };
  const char32_t first = byte(at);
  if (first < 0x80) return ++at, first;
  const size_t size = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  char32_t out = first & (0xFFu >> (size + 1));
  for (size_t i = 1; i < size; ++i) out = out << 6 | (byte(at + i) & 0x3F);
  at += size;
  return out;
}

void append(std::string& text, char32_t code_point);

size_t valid_size(std::string_view text);  // the number of valid bytes at the start

// Replaces invalid UTF-8 by U+FFFD, one for each maximal prefix of a sequence, as Unicode
// recommends.
std::string lossy(std::string_view bytes);

}  // namespace horner::text

// From tokens back to text: steps over a list of strings, which starts as the tokens.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace horner::text {

struct DecodeBytes {};  // see to_bytes
struct DecodeReplace {
  std::string pattern, content;
};
struct DecodeFallback {};  // <0x0A> …
struct DecodeFuse {};
struct DecodeStrip {
  std::string content;
  size_t start, stop;  // at most so many at the ends of each string
};
struct DecodeMetaspace {
  std::string replacement;
  bool prepended;
};
using Decoder = std::variant<DecodeBytes, DecodeReplace, DecodeFallback, DecodeFuse, DecodeStrip,
                             DecodeMetaspace>;

std::string decoded(const std::vector<Decoder>&, std::vector<std::string> tokens);

// Byte-level tokenizers write bytes as printable characters ("Ġ" is a space). Appends the bytes;
// false, with `out` unchanged, if the text contains any other character.
bool to_bytes(std::string_view text, std::string& out);

// The byte that "<0x0A>" names, or -1.
int fallback_byte(std::string_view token);

}  // namespace horner::text

// From tokens back to text: steps over a list of strings, the tokens at first.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace horner::text {

struct DecodeBytes {};  // the characters that stand for bytes, see byte_of
struct DecodeReplace {
  std::string pattern, content;
};
struct DecodeFallback {};  // <0x0A> …
struct DecodeFuse {};
struct DecodeStrip {
  std::string content;
  size_t start, stop;  // at most so many at either end of each
};
struct DecodeMetaspace {
  std::string replacement;
  bool prepended;
};
using Decoder = std::variant<DecodeBytes, DecodeReplace, DecodeFallback, DecodeFuse, DecodeStrip,
                             DecodeMetaspace>;

std::string decoded(const std::vector<Decoder>&, std::vector<std::string> tokens);

// Byte-level tokenizers write bytes as printable characters ("Ġ" is a space): back to bytes.
// False, with `out` untouched, when the text has another character.
bool to_bytes(std::string_view text, std::string& out);

// The byte that "<0x0A>" names, or -1.
int fallback_byte(std::string_view token);

}  // namespace horner::text

// Splitters: how a tokenizer cuts text into words, which byte-pair encoding takes one by one.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "text/bpe.h"
#include "text/regex.h"

namespace horner::text {

enum class Behaviour { isolated, removed, merged_with_previous, merged_with_next, contiguous };

struct Split {
  Regex pattern;
  Behaviour behaviour;
  bool invert = false;
};
// The words of GPT-2, which ByteLevel cuts text into by default.
inline constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct ByteLevel {  // always the last step: its words are bytes
  bool prefix_space;
  std::optional<Regex> pattern;
};
enum class Scheme { always, first, never };
struct Metaspace {
  std::string replacement;  // for spaces
  Scheme prepend;
  bool split;
};
using Splitter = std::variant<Split, ByteLevel, Metaspace>;

// Where a piece of text comes from.
struct Place {
  bool first = true;       // it begins the whole text
  bool continues = false;  // the whole text continues an earlier one: nothing is prepended
};

// Appends the tokens of every word of `text` to `out`.
void encode_words(std::span<const Splitter>, std::string_view text, Place, const Bpe&, WordCache&,
                  std::vector<Token>& out);

}  // namespace horner::text

// Tokens that are found in the text itself, before anything else looks at it: special ones, and
// others.
#pragma once

#include <bitset>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/bpe.h"
#include "text/regex.h"

namespace horner::text {

struct AddedToken {
  std::string content;
  Token id;
  bool single_word, lstrip, rstrip, normalized, special;
};

// Finds the leftmost of some tokens, and of those the longest.
class AddedFinder {
 public:
  struct Pattern {
    std::string text;
    AddedToken token;
  };
  AddedFinder(std::vector<Pattern> = {});

  struct Match {
    const AddedToken* token;
    Range range;  // with the white space that the token takes along, but not what is taken
    size_t next;  // where to go on: as in the tokenizers package, inside that white space
  };
  // In `text` at `from` or behind; what is before `taken` belongs to tokens already.
  std::optional<Match> find(std::string_view text, size_t from, size_t taken) const;

 private:
  const Pattern* longest(std::string_view text) const;  // that `text` begins with

  std::vector<Pattern> patterns_;
  std::vector<uint32_t> ends_;  // by node of a trie: 1 + the pattern that ends there, or 0
  PairTable next_;              // (node, byte) → node
  std::bitset<65536> starts_;   // the first two bytes of all
};

}  // namespace horner::text

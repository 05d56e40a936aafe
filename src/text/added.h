// Added tokens: special and other tokens that are matched in the text itself, before any other
// stage.
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

// Finds the leftmost match of a set of tokens, and the longest at that place.
class AddedFinder {
 public:
  struct Pattern {
    std::string text;
    AddedToken token;
  };
  AddedFinder(std::vector<Pattern> = {});

  struct Match {
    const AddedToken* token;
    Range range;  // includes the white space that the token strips, except what is taken
    size_t next;  // where to continue: inside that white space, as in the tokenizers package
  };
  // Searches `text` from `from` on; bytes before `taken` already belong to tokens.
  std::optional<Match> find(std::string_view text, size_t from, size_t taken) const;

 private:
  const Pattern* longest(std::string_view text) const;  // the longest prefix of `text`

  std::vector<Pattern> patterns_;
  std::vector<uint32_t> ends_;  // for each node of a trie: 1 + the pattern that ends there, or 0
  PairTable next_;              // (node, byte) → node
  std::bitset<65536> starts_;   // the first two bytes of every pattern
};

}  // namespace horner::text

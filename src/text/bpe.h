// Byte-pair encoding: a word starts as its characters; the adjacent pair with the lowest rank is
// merged until no pair has a rank.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace horner::text {

using Token = uint32_t;
inline constexpr Token kNone = ~Token(0);

// Hash table from a pair of numbers to a number, by open addressing. The pair (~0, ~0) is reserved.
class PairTable {
 public:
  PairTable(size_t most = 0);
  void set(uint32_t a, uint32_t b, uint64_t value);  // overwrites
  uint64_t get(uint32_t a, uint32_t b) const;        // ~0 if absent

 private:
  std::vector<std::pair<uint64_t, uint64_t>> slots_;
  size_t mask_ = 0;
};

uint64_t hash_of(std::string_view);

// Hash table from text to a number, by open addressing; all keys are in one string.
class TextTable {
 public:
  void reserve(size_t keys);
  bool add(std::string_view key, Token value);  // false, without a change, if present
  std::optional<Token> find(std::string_view key) const;

 private:
  struct Slot {
    uint32_t hash, at, size, value;  // value kNone: empty
  };
  size_t slot(std::string_view key, uint64_t hash) const;

  std::vector<Slot> slots_;
  std::string keys_;
  size_t used_ = 0;
};

// Words consist of bytes if `bytes` is set, of characters otherwise.
struct Bpe {
  bool bytes = false, fuse_unknown = false, ignore_merges = false;
  Token unknown = kNone;  // for characters without a token; kNone: they are dropped
  TextTable vocabulary;
  std::vector<Token> of_character;      // indexed by code point or byte
  std::array<Token, 256> of_byte = {};  // <0x00> …; with `fallback` they replace `unknown`
  bool fallback = false;
  PairTable merges;  // (left, right) → rank << 32 | joined

  // The pairs of characters at the seam of some merge. A word can be cut between any other two
  // characters without changing its tokens.
  PairTable joined;
  std::array<std::array<bool, 129>, 129> joined_common = {};  // ASCII, and '▁' as 128
};

// Cache of words and their tokens. Cleared when it is full.
class WordCache {
 public:
  WordCache();
  // The tokens of the word; nullptr if it is not cached.
  const Token* find(std::string_view word, size_t hash, size_t& count) const;
  void add(std::string_view word, size_t hash, const Token* tokens, size_t count);

 private:
  struct Slot {
    uint64_t hash;
    uint32_t word, word_size, tokens, count;
  };
  std::vector<Slot> slots_;
  std::string words_;
  std::vector<Token> tokens_;
  size_t used_ = 0;
};

// Builds the tables; the flags must be set. `merges` are in the order of their rank.
void finish(Bpe&, const std::vector<std::pair<std::string, Token>>& vocabulary,
            const std::vector<std::pair<std::string, std::string>>& merges);

void encode(const Bpe&, WordCache&, std::string_view word, std::vector<Token>& out);

}  // namespace horner::text

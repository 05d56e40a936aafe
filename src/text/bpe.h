// Byte-pair encoding: a word begins as its characters, and of all neighbours in it the pair with
// the lowest rank is joined until none has one.
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

// From two numbers to one, by open addressing. The key with both at their largest is not for use.
class PairTable {
 public:
  PairTable(size_t most = 0);
  void set(uint32_t a, uint32_t b, uint64_t value);  // the last one set stays
  uint64_t get(uint32_t a, uint32_t b) const;        // ~0 where nothing was set

 private:
  std::vector<std::pair<uint64_t, uint64_t>> slots_;
  size_t mask_ = 0;
};

uint64_t hash_of(std::string_view);

// From text to a number, by open addressing over one string of all the keys.
class TextTable {
 public:
  void reserve(size_t keys);
  bool add(std::string_view key, Token value);  // false, and no change, when it is there
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

// Words are bytes when `bytes` is set, and characters else.
struct Bpe {
  bool bytes = false, fuse_unknown = false, ignore_merges = false;
  Token unknown = kNone;  // for characters without a token; kNone: they vanish
  TextTable vocabulary;
  std::vector<Token> of_character;      // by code point or byte
  std::array<Token, 256> of_byte = {};  // <0x00> …, when `fallback`: instead of `unknown`
  bool fallback = false;
  PairTable merges;  // (left, right) → rank << 32 | joined

  // The characters that end the left and begin the right part of some merge. Between any others a
  // word can be cut without a change: what is joined later was joined there once.
  PairTable joined;
  std::array<std::array<bool, 129>, 129> joined_common = {};  // ASCII, and '▁' as 128
};

// Words and their tokens, for the words that come again. Forgets all when it is full.
class WordCache {
 public:
  WordCache();
  // The tokens of the word; nullptr where it is not known.
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

// Fills in the rest when the flags are set: `vocabulary` and, in the order of their rank, `merges`.
void finish(Bpe&, const std::vector<std::pair<std::string, Token>>& vocabulary,
            const std::vector<std::pair<std::string, std::string>>& merges);

void encode(const Bpe&, WordCache&, std::string_view word, std::vector<Token>& out);

}  // namespace horner::text

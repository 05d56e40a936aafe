// Tasks that ask for the state of a machine after every token, or of one that the sequence shows.
#include <algorithm>
#include <array>
#include <map>

#include "core/check.h"
#include "study/task_kinds.h"

namespace horner::study {

// A start token (2), then bits; the target is the parity of all bits so far.
void parity(const Shape&, const Random& random, Tokens tokens, Tokens targets) {
  tokens[0] = 2;
  int64_t odd = 0;
  for (size_t t = 1; t < tokens.size(); ++t) {
    tokens[t] = int64_t(random(2));
    targets[t] = odd ^= tokens[t];
  }
}

// A start token (6), then transpositions of three things: token i exchanges what is at the places i
// and i + 1 (mod 3). The target is the permutation so far, one of 6 by lexical order.
void s3(const Shape&, const Random& random, Tokens tokens, Tokens targets) {
  tokens[0] = 6;
  std::array<int64_t, 3> at = {0, 1, 2};
  for (size_t t = 1; t < tokens.size(); ++t) {
    const auto i = size_t(random(3));
    tokens[t] = int64_t(i);
    std::swap(at[i], at[(i + 1) % 3]);
    targets[t] = 2 * at[0] + (at[1] > at[2]);
  }
}
void check_bits(const Shape&, size_t length) {
  constexpr size_t kLeast = 8;  // so that both splits have sequences
  check(length >= kLeast, "a sequence must have at least ", kLeast, " tokens, not ", length);
}

// A start token (120), then permutations of five things, one of 120 by lexical order, each applied
// after those before. The target is their product so far (the word problem of arXiv 2404.08819).
static std::array<int64_t, 5> permutation_of(int64_t number) {
  std::array<int64_t, 5> out{}, left = {0, 1, 2, 3, 4};
  int64_t each = 24;
  for (int64_t i = 0; i < 5; ++i) {
    const int64_t at = number / each;
    out[size_t(i)] = left[size_t(at)];
    std::copy(left.begin() + at + 1, left.end(), left.begin() + at);
    number %= each;
    if (i < 4) each /= 4 - i;
  }
  return out;
}
static int64_t number_of(const std::array<int64_t, 5>& p) {
  int64_t out = 0;
  for (size_t i = 0; i < 5; ++i)
    out = out * int64_t(5 - i) +
          std::count_if(p.begin() + long(i), p.end(), [&](int64_t x) { return x < p[i]; });
  return out;
}
void s5(const Shape&, const Random& random, Tokens tokens, Tokens targets) {
  tokens[0] = 120;
  std::array<int64_t, 5> at = {0, 1, 2, 3, 4};
  for (size_t t = 1; t < tokens.size(); ++t) {
    tokens[t] = int64_t(random(120));
    const auto next = permutation_of(tokens[t]);
    std::array<int64_t, 5> product{};
    for (size_t i = 0; i < 5; ++i) product[i] = next[size_t(at[i])];
    at = product;
    targets[t] = number_of(at);
  }
}

// A sum from left to right modulo 5: operators 5 (+), 6 (−) and 7 (×), each with a number after it,
// which × takes from 1 to 4. The target of every number is the value so far; it begins with 0 (8).
void modular(const Shape&, const Random& random, Tokens tokens, Tokens targets) {
  constexpr int64_t kModulus = 5;
  tokens[0] = 2 * kModulus - 2;
  int64_t value = 0, op = 0;
  for (size_t t = 1; t < tokens.size(); ++t) {
    if (t % 2 == 1) {
      op = int64_t(random(3)), tokens[t] = kModulus + op;
      continue;
    }
    const int64_t x = op == 2 ? 1 + int64_t(random(kModulus - 1)) : int64_t(random(kModulus));
    value = (op == 0 ? value + x : op == 1 ? value - x + kModulus : value * x) % kModulus;
    tokens[t] = x, targets[t] = value;
  }
}

// In-context automata (RegBench, arXiv 2401.12973): words of one random automaton per sequence,
// each from its first state, with a separator between them. The automaton has 4 to 12 states and an
// alphabet of as many symbols; a state has 1 to 4 symbols, each with the state it leads to. Asked
// is the symbol after a beginning that an earlier word has too, where its state allows only one.
void automata(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  const int64_t symbols = s.vocabulary - 1;
  const int64_t states = 4 + int64_t(random(uint64_t(std::min<int64_t>(symbols, 12) - 3)));
  const std::vector<int64_t> alphabet = drawn(random, states, symbols);
  struct Edge {
    int64_t symbol, to;
  };
  std::vector<std::vector<Edge>> edges{size_t(states)};
  for (auto& out : edges)
    for (const int64_t i : drawn(random, 1 + int64_t(random(4)), states))
      out.push_back({alphabet[size_t(i)], int64_t(random(uint64_t(states)))});
  constexpr uint64_t kLongest = 10;
  std::vector<std::vector<int64_t>> seen;  // beginnings of earlier words that went on
  for (size_t t = 0; t < tokens.size();) {
    std::vector<int64_t> word;
    std::vector<std::vector<int64_t>> own;
    size_t state = 0;
    const uint64_t length = 1 + random(kLongest);
    tokens[t] = symbols;  // the separator, which begins the first word too
    for (uint64_t i = 0; i < length && t + 1 < tokens.size(); ++i, ++t) {
      const Edge e = edges[state][random(edges[state].size())];
      if (edges[state].size() == 1 && std::ranges::find(seen, word) != seen.end())
        targets[t] = e.symbol;
      own.push_back(word);
      tokens[t + 1] = e.symbol, word.push_back(e.symbol), state = size_t(e.to);
    }
    seen.insert(seen.end(), own.begin(), own.end());
    ++t;
  }
}
void check_automata(const Shape& s, size_t length) {
  check(s.vocabulary >= 5, "automata requires a vocabulary of at least 5, not ", s.vocabulary);
  check(length >= 32, "automata requires sequences of at least 32 tokens, not ", length);
}

}  // namespace horner::study

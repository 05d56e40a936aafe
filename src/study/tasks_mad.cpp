// The six tasks of MAD (arXiv 2403.17844), with a target only where there is something to answer.
#include <algorithm>
#include <map>

#include "core/check.h"
#include "core/random.h"
#include "study/task_kinds.h"

namespace horner::study {

// Pairs of a key (the lower half of the first `all` tokens) and its value (the upper half), which
// the sequence chooses; a share of 1 in `noise` pairs is noise (tokens from `all` on; 0: none).
// Asked is the value of every key that was seen before.
static void recall_pairs(int64_t all, int64_t vocabulary, uint64_t noise, const Random& random,
                         Tokens tokens, Tokens targets) {
  std::map<int64_t, int64_t> value_of;
  for (size_t t = 0; t < tokens.size(); t += 2) {
    int64_t pair[2];
    if (noise > 0 && random(noise) == 0) {
      for (int64_t& x : pair) x = all + int64_t(random(uint64_t(vocabulary - all)));
    } else {
      pair[0] = int64_t(random(uint64_t(all / 2)));
      const bool known = value_of.contains(pair[0]);
      if (!known) value_of[pair[0]] = all / 2 + int64_t(random(uint64_t(all - all / 2)));
      pair[1] = value_of[pair[0]];
      if (known) targets[t] = pair[1];
    }
    tokens[t] = pair[0];
    if (t + 1 < tokens.size()) tokens[t + 1] = pair[1];
  }
}
void mad_recall(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  recall_pairs(s.vocabulary, s.vocabulary, 0, random, tokens, targets);
}
void mad_noisy_recall(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  recall_pairs(s.vocabulary / 2, s.vocabulary, 5, random, tokens, targets);
}

// Keys and values of one to three tokens, of the lower and the upper half of the vocabulary; a
// sequence has 8 different keys. Asked are the tokens of the value of every key seen before.
void mad_fuzzy_recall(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  constexpr size_t kKeys = 8;
  constexpr uint64_t kLongest = 3;
  const int64_t half = s.vocabulary / 2;
  using Motif = std::vector<int64_t>;
  const auto motif = [&](int64_t first, int64_t n) {
    Motif out = drawn(random, 1 + int64_t(random(kLongest)), n);
    for (int64_t& x : out) x += first;
    return out;
  };
  std::vector<std::pair<Motif, Motif>> pairs;
  while (pairs.size() < kKeys) {
    const Motif key = motif(0, half);
    if (std::ranges::find(pairs, key, &std::pair<Motif, Motif>::first) == pairs.end())
      pairs.emplace_back(key, motif(half, s.vocabulary - half));
  }
  std::vector<bool> known(kKeys);
  for (size_t t = 0; t < tokens.size();) {
    const size_t i = random(kKeys);
    for (const Motif* part : {&pairs[i].first, &pairs[i].second})
      for (const int64_t x : *part) {
        if (part == &pairs[i].second && known[i] && t > 0 && t <= tokens.size()) targets[t - 1] = x;
        if (t < tokens.size()) tokens[t] = x;
        ++t;
      }
    known[i] = true;
  }
}

// A key, then a token that asks for its value, which is the same in all sequences and has to be
// learned; the last token of the vocabulary asks.
void mad_memorize(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  constexpr uint64_t kSeed = 12345;  // of the one assignment of values to keys
  const int64_t keys = (s.vocabulary - 1) / 2, ask = s.vocabulary - 1;
  uint64_t drawn_so_far = 0;
  const std::vector<int64_t> values = drawn(
      [&](uint64_t below) { return random_bits(kSeed, 0, drawn_so_far++) % below; }, keys, keys);
  for (size_t t = 0; t < tokens.size(); ++t) {
    if (t % 2 == 0)
      tokens[t] = int64_t(random(uint64_t(keys)));
    else
      tokens[t] = ask, targets[t] = keys + values[size_t(tokens[t - 1])];
  }
}

// A string, a token that ends it (the last of the vocabulary), then blanks (the one before): the
// string, token by token, from what the model kept. MAD reads it out of one vector instead.
void mad_compress(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  const size_t n = (tokens.size() - 1) / 2;
  std::fill(tokens.begin(), tokens.end(), s.vocabulary - 2);
  for (size_t i = 0; i < n; ++i) tokens[i] = int64_t(random(uint64_t(s.vocabulary - 2)));
  tokens[n] = s.vocabulary - 1;
  for (size_t i = 0; i < n; ++i) targets[n + 1 + i] = tokens[i];
}

// `pairs` tokens among blanks, a token that asks (the last of the vocabulary), then blanks: the
// tokens in order.
void mad_select(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  const auto n = size_t(s.pairs);
  const size_t before = tokens.size() - n - 1;
  std::fill(tokens.begin(), tokens.end(), s.vocabulary - 2);
  tokens[before] = s.vocabulary - 1;
  std::vector<int64_t> places = drawn(random, s.pairs, int64_t(before));
  std::sort(places.begin(), places.end());
  for (size_t i = 0; i < n; ++i) {
    targets[before + 1 + i] = int64_t(random(uint64_t(s.vocabulary - 2)));
    tokens[size_t(places[i])] = targets[before + 1 + i];
  }
}

void check_mad(const Shape& s, size_t length) {
  check(s.vocabulary >= 8, "a task of MAD requires a vocabulary of at least 8, not ", s.vocabulary);
  const size_t least = s.pairs > 0 ? size_t(2 * s.pairs + 2) : 16;
  check(length >= least, "this task of MAD requires sequences of at least ", least, " tokens, not ",
        length);
}

}  // namespace horner::study

// Programs that solve the tasks without learning: the answer after the token at t.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "study/tasks.h"

namespace horner::study {

using train::Split;

struct Sequence {
  std::vector<int64_t> tokens, targets;
};
inline Sequence sequence(const train::Source& s, Split split, uint64_t index, size_t T) {
  Sequence out{std::vector<int64_t>(T), std::vector<int64_t>(T, 7)};
  s.fill(split, index, out.tokens, out.targets);
  return out;
}

// What followed the previous occurrence of the token at t: solves recall and induction.
inline int64_t looked_up(const std::vector<int64_t>& tokens, size_t t) {
  for (size_t s = t; s-- > 0;)
    if (tokens[s] == tokens[t]) return tokens[s + 1];
  return -2;
}
// The token as far from the start as t is from the separator.
inline int64_t copied(const std::vector<int64_t>& tokens, size_t t) {
  return tokens[t - (tokens.size() - tokens.size() / 2)];
}

// The bits so far, added up.
inline int64_t parity_of(const std::vector<int64_t>& tokens, size_t t) {
  int64_t sum = 0;
  for (size_t s = 1; s <= t; ++s) sum += tokens[s];
  return sum % 2;
}
// A product of 3 x 3 permutation matrices, looked up among all six.
inline int64_t product_of(const std::vector<int64_t>& tokens, size_t t) {
  using Matrix = std::array<std::array<int, 3>, 3>;
  const Matrix exchanges[] = {{{{0, 1, 0}, {1, 0, 0}, {0, 0, 1}}},
                              {{{1, 0, 0}, {0, 0, 1}, {0, 1, 0}}},
                              {{{0, 0, 1}, {0, 1, 0}, {1, 0, 0}}}};
  Matrix all = {{{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}};
  for (size_t s = 1; s <= t; ++s) {
    Matrix next = {};
    for (int i = 0; i < 3; ++i)
      for (int j = 0; j < 3; ++j)
        for (int k = 0; k < 3; ++k) next[i][j] += exchanges[tokens[s]][i][k] * all[k][j];
    all = next;
  }
  std::vector<int> order;  // which thing each place has
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 3; ++j)
      if (all[i][j] == 1) order.push_back(j);
  std::vector<int> each = {0, 1, 2};
  for (int64_t number = 0;; ++number, std::next_permutation(each.begin(), each.end()))
    if (each == order) return number;
}

// The digit that followed the same two letters and the same digits before.
inline int64_t digit_of(const std::vector<int64_t>& tokens, size_t t) {
  size_t colon = t;
  while (tokens[colon] != 10) --colon;
  for (size_t s = 2; s < colon; ++s)
    if (tokens[s] == 10 && tokens[s - 1] == tokens[colon - 1] && tokens[s - 2] == tokens[colon - 2])
      return tokens[s + t - colon + 1];
  return -2;
}
// The digit at the same place of the earlier sentence with the same words up to its number.
inline int64_t found_in_text(const std::vector<int64_t>& tokens, size_t t) {
  const std::string text(tokens.begin(), tokens.begin() + ptrdiff_t(t) + 1);
  const size_t begin = text.rfind("\nThe magic number of ");
  const size_t number = text.rfind(" is ") + 4;
  const size_t at = text.find(text.substr(begin, number - begin));
  return at < begin ? int64_t(text[at + text.size() - begin]) : -2;
}
// Keys of several tokens: the runs of tokens below 8, each before its value.
inline int64_t fuzzy(const std::vector<int64_t>& tokens, size_t t) {
  std::map<std::vector<int64_t>, std::vector<int64_t>> known;
  std::vector<int64_t> key, value;
  for (size_t s = 0; s <= t; ++s) {
    if (tokens[s] < 8 && !value.empty()) known.emplace(key, value), key.clear(), value.clear();
    (tokens[s] < 8 ? key : value).push_back(tokens[s]);
  }
  return known.contains(key) ? known[key].at(value.size()) : -2;
}
// By the values of all keys, from sequences of training.
inline int64_t memorized(const std::vector<int64_t>& tokens, size_t t) {
  static const auto known = [] {
    std::map<int64_t, int64_t> out;
    const train::Source source = make_source("mad_memorize", "", 77);
    for (uint64_t i = 0; i < 200; ++i) {
      const Sequence q = sequence(source, Split::train, i, 32);
      for (size_t s = 1; s < 32; s += 2) out[q.tokens[s - 1]] = q.targets[s];
    }
    return out;
  }();
  return known.at(tokens[t - 1]);
}
inline int64_t from_the_start(const std::vector<int64_t>& tokens, size_t t) {
  return tokens[t - (tokens.size() - 1) / 2 - 1];
}
// The tokens that are not blank, in order.
inline int64_t selected(const std::vector<int64_t>& tokens, size_t t) {
  const size_t ask = size_t(std::find(tokens.begin(), tokens.end(), 15) - tokens.begin());
  std::vector<int64_t> found;
  for (size_t s = 0; s < ask; ++s)
    if (tokens[s] != 14) found.push_back(tokens[s]);
  return found.at(t - ask - 1);
}
// What followed the same beginning in an earlier word.
inline int64_t same_beginning(const std::vector<int64_t>& tokens, size_t t) {
  size_t begin = t;
  while (tokens[begin] != 18) --begin;
  for (size_t s = 0; s < begin; ++s) {
    if (tokens[s] != 18) continue;
    size_t i = 0;
    while (i < t - begin && tokens[s + 1 + i] == tokens[begin + 1 + i]) ++i;
    if (i == t - begin && tokens[s + 1 + i] != 18) return tokens[s + 1 + i];
  }
  return -2;
}
inline int64_t value_so_far(const std::vector<int64_t>& tokens, size_t t) {
  int64_t value = 0;
  for (size_t s = 2; s <= t; s += 2)
    value += tokens[s - 1] == 5   ? tokens[s]
             : tokens[s - 1] == 6 ? -tokens[s]
                                  : value * (tokens[s] - 1),
        value = ((value % 5) + 5) % 5;
  return value;
}
// Permutations as a list in lexical order.
inline int64_t s5_product(const std::vector<int64_t>& tokens, size_t t) {
  static const auto all = [] {
    std::vector<std::array<int, 5>> out;
    std::array<int, 5> each = {0, 1, 2, 3, 4};
    do out.push_back(each);
    while (std::next_permutation(each.begin(), each.end()));
    return out;
  }();
  std::array<int, 5> at = all[0];
  for (size_t s = 1; s <= t; ++s)
    for (int& x : at) x = all[size_t(tokens[s])][size_t(x)];
  return std::find(all.begin(), all.end(), at) - all.begin();
}

}  // namespace horner::study

// Tasks that ask what stood where in the sequence.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/check.h"
#include "study/task_kinds.h"

namespace horner::study {

// n distinct numbers below `all`, in random order.
std::vector<int64_t> drawn(const Random& random, int64_t n, int64_t all) {
  std::vector<int64_t> out(all);
  std::iota(out.begin(), out.end(), 0);
  for (int64_t i = 0; i < n; ++i) std::swap(out[i], out[i + random(all - i)]);
  out.resize(n);
  return out;
}

// Multi-query associative recall (arXiv 2312.04927): key value key value …, then again a key, its
// value, a key, its value … Keys are distinct tokens of the lower half of the vocabulary; the
// target is the value of each key of the second part, which repeats keys only after all appeared.
void recall(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  const int64_t half = s.vocabulary / 2;
  const std::vector<int64_t> keys = drawn(random, s.pairs, half);
  std::vector<int64_t> values(s.pairs), order;
  for (int64_t& v : values) v = half + int64_t(random(s.vocabulary - half));
  for (int64_t i = 0; i < s.pairs; ++i) tokens[2 * i] = keys[i], tokens[2 * i + 1] = values[i];
  for (size_t t = size_t(2 * s.pairs); t < tokens.size(); t += 2) {
    if (order.empty()) order = drawn(random, s.pairs, s.pairs);
    const int64_t pair = order.back();
    order.pop_back();
    tokens[t] = keys[pair], targets[t] = values[pair];
    if (t + 1 < tokens.size()) tokens[t + 1] = values[pair];
  }
}
void check_recall(const Shape& s, size_t length) {
  check(s.pairs >= 1 && s.vocabulary >= 2 * s.pairs, "recall of ", s.pairs,
        " pairs requires a vocabulary of at least ", 2 * s.pairs, ", not ", s.vocabulary);
  check(length > size_t(2 * s.pairs), "recall of ", s.pairs,
        " pairs requires sequences longer than ", 2 * s.pairs, " tokens, not ", length);
}

// A random string, a separator (the last token of the vocabulary), and the string again.
void copy(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  const size_t n = tokens.size() / 2;
  for (size_t i = 0; i < n; ++i) tokens[i] = int64_t(random(s.vocabulary - 1));
  std::fill(tokens.begin() + n, tokens.end(), s.vocabulary - 1);  // two if the length is odd
  const size_t separator = tokens.size() - n;
  for (size_t i = 0; i < n; ++i) targets[separator + i] = tokens[i];
  for (size_t i = 0; i + 1 < n; ++i) tokens[separator + 1 + i] = tokens[i];
}
void check_copy(const Shape& s, size_t length) {
  check(s.vocabulary >= 3, "copy requires a vocabulary of at least 3, not ", s.vocabulary);
  check(length >= 2, "copy requires sequences of at least 2 tokens, not ", length);
}

// Noise with triggers (tokens of the upper quarter of the vocabulary), each always followed by the
// same token, which the sequence chooses; the target is what follows a trigger seen before.
void induction(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  const int64_t triggers = s.vocabulary / 4, noise = s.vocabulary - triggers;
  const std::vector<int64_t> chosen = drawn(random, s.pairs, triggers);
  std::vector<int64_t> follower(s.pairs);
  std::vector<bool> seen(s.pairs);
  for (int64_t& f : follower) f = int64_t(random(noise));
  for (size_t t = 0; t < tokens.size(); ++t) {
    tokens[t] = int64_t(random(noise));
    if (random(3) != 0) continue;
    const size_t i = random(s.pairs);
    tokens[t] = noise + chosen[i];
    if (seen[i]) targets[t] = follower[i];
    seen[i] = true;
    if (++t < tokens.size()) tokens[t] = follower[i];
  }
}
void check_induction(const Shape& s, size_t length) {
  check(s.pairs >= 1 && s.vocabulary >= 4 * s.pairs, "induction with ", s.pairs,
        " triggers requires a vocabulary of at least ", 4 * s.pairs, ", not ", s.vocabulary);
  check(length >= size_t(8 * s.pairs), "induction with ", s.pairs,
        " triggers requires sequences of at least ", 8 * s.pairs, " tokens, not ", length);
}

// `n` of the numbers below `all`, in order: number i is drawn with a probability in proportion to
// 1 / (i + 1), so that most are near 0 and the gaps between them grow. The n smallest of
// exponential variables with these rates are such a draw.
static std::vector<size_t> early(const Random& random, size_t n, size_t all) {
  constexpr uint64_t kSteps = uint64_t(1) << 53;
  std::vector<std::pair<double, size_t>> times(all);
  for (size_t i = 0; i < all; ++i)
    times[i] = {-std::log((double(random(kSteps)) + 0.5) / double(kSteps)) * double(i + 1), i};
  std::sort(times.begin(), times.end());
  std::vector<size_t> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = times[i].second;
  std::sort(out.begin(), out.end());
  return out;
}

// Recall as arXiv 2312.04927 has it: key value key value …, then keys at gaps of a power law among
// blanks (the last token of the vocabulary), each once, or as many as half of the tokens left.
// Nothing after the pairs tells a value.
int64_t mqar_values(const Shape& s) {
  return s.values > 0 ? s.values : s.vocabulary - 1 - s.vocabulary / 2;
}
void mqar(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  const int64_t first = s.vocabulary - 1 - mqar_values(s);  // the keys are below the first value
  const std::vector<int64_t> keys = drawn(random, s.pairs, first);
  std::vector<int64_t> values(s.pairs);
  for (int64_t& v : values) v = first + int64_t(random(uint64_t(mqar_values(s))));
  std::fill(tokens.begin(), tokens.end(), s.vocabulary - 1);
  for (int64_t i = 0; i < s.pairs; ++i) tokens[2 * i] = keys[i], tokens[2 * i + 1] = values[i];
  const size_t used = s.used > 0 ? std::min(size_t(s.used), tokens.size()) : tokens.size();
  const size_t begin = size_t(2 * s.pairs), left = used - begin;
  const size_t asked = std::min(size_t(s.pairs), (left + 1) / 2);
  const std::vector<int64_t> order = drawn(random, int64_t(asked), s.pairs);
  const std::vector<size_t> places = early(random, asked, left);
  for (size_t i = 0; i < asked; ++i)
    tokens[begin + places[i]] = keys[order[i]], targets[begin + places[i]] = values[order[i]];
}
// Training has sequences of fewer pairs too, as there: pairs, pairs / 2, pairs / 4, … down to 4. A
// curriculum begins with the fewest and adds the next size after equal parts of its sequences; as
// there, sequences of few pairs are short: they ask within 4 tokens a pair, and blanks follow.
void practise_mqar(Shape& s, const Random& random, uint64_t index) {
  constexpr int64_t kLeast = 4;
  uint64_t sizes = 1;
  while (s.pairs >> sizes >= kLeast) ++sizes;
  const auto over = uint64_t(s.curriculum);
  const uint64_t allowed = index < over ? 1 + index * sizes / over : sizes;
  s.pairs >>= sizes - allowed + random(allowed);
  if (over > 0) s.used = 4 * s.pairs;
}
void check_mqar(const Shape& s, size_t length) {
  const int64_t least = s.values > 0 ? s.pairs + s.values + 1 : std::max<int64_t>(2 * s.pairs, 4);
  check(s.pairs >= 1 && s.vocabulary >= least, "mqar of ", s.pairs,
        " pairs requires a vocabulary of at least ", least, ", not ", s.vocabulary);
  check(length > size_t(2 * s.pairs), "mqar of ", s.pairs, " pairs requires sequences longer than ",
        2 * s.pairs, " tokens, not ", length);
}

// Entries of two letters, a colon, seven digits and a line end (the phone book of arXiv
// 2402.01032); then entries again, and the digits of each are asked. The letters begin at 12.
static constexpr size_t kDigits = 7, kEntry = kDigits + 4;
void phone_book(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  constexpr int64_t kColon = 10, kEnd = 11, kLetters = 12;
  const int64_t letters = s.vocabulary - kLetters;
  const std::vector<int64_t> names = drawn(random, s.pairs, letters * letters);
  std::vector<int64_t> book;
  for (const int64_t name : names) {
    book.insert(book.end(), {kLetters + name / letters, kLetters + name % letters, kColon});
    for (size_t i = 0; i < kDigits; ++i) book.push_back(int64_t(random(10)));
    book.push_back(kEnd);
  }
  std::vector<int64_t> order;
  size_t from = 0;
  for (size_t t = 0; t < tokens.size(); ++t) {
    const size_t at = t % kEntry;
    if (t < book.size()) {
      tokens[t] = book[t];
      continue;
    }
    if (at == 0) {
      if (order.empty()) order = drawn(random, s.pairs, s.pairs);
      from = size_t(order.back()) * kEntry;
      order.pop_back();
    }
    tokens[t] = book[from + at];
    if (at >= 2 && at < 2 + kDigits) targets[t] = book[from + at + 1];
  }
}
void check_phone_book(const Shape& s, size_t length) {
  const int64_t letters = s.vocabulary - 12;
  check(letters > 0 && s.pairs >= 1 && letters * letters >= s.pairs, "phone_book of ", s.pairs,
        " entries requires a vocabulary of 12 tokens and enough letters for pairs of them, not ",
        s.vocabulary);
  check(length >= size_t(s.pairs + 1) * kEntry, "phone_book of ", s.pairs,
        " entries requires sequences of at least ", size_t(s.pairs + 1) * kEntry, " tokens, not ",
        length);
}

// A needle in a haystack (as in RULER, arXiv 2404.06654): sentences with a key of letters and a
// number, each at a random place of the text that the tokens come with; then all are asked in
// random order, and the digits of each number are the targets. Tokens are bytes.
static constexpr std::string_view kBefore = "\nThe magic number of ", kBetween = " is ",
                                  kAfter = ".\n";
static constexpr size_t kLetters = 6;
static constexpr size_t kQuestion = kBefore.size() + kLetters + kBetween.size() + kDigits;
void needle(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  std::vector<std::string> keys, numbers;
  const auto drawn_from = [&](char first, uint64_t all, size_t n) {
    std::string out(n, first);
    for (char& c : out) c = char(first + int(random(all)));
    return out;
  };
  while (keys.size() < size_t(s.pairs)) {
    const std::string key = drawn_from('a', 26, kLetters);
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
  for (int64_t i = 0; i < s.pairs; ++i) numbers.push_back(drawn_from('0', 10, kDigits));
  const size_t needle_size = kQuestion + kAfter.size();
  // The last digit of all is a target only: it need not stand in the tokens.
  const size_t left = tokens.size() - size_t(s.pairs) * (needle_size + kQuestion) + 1;
  std::vector<size_t> places;
  for (int64_t i = 0; i < s.pairs; ++i) places.push_back(random(left + 1));
  std::sort(places.begin(), places.end());
  std::vector<int64_t> out;
  const auto write = [&](std::string_view text) {
    for (const char c : text) out.push_back(uint8_t(c));
  };
  const auto sentence = [&](size_t i) {
    write(kBefore), write(keys[i]), write(kBetween), write(numbers[i]);
  };
  size_t used = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    out.insert(out.end(), tokens.begin() + used, tokens.begin() + places[i]);
    used = places[i];
    sentence(i), write(kAfter);
  }
  out.insert(out.end(), tokens.begin() + used, tokens.begin() + left);
  for (const int64_t i : drawn(random, s.pairs, s.pairs)) {
    sentence(size_t(i));
    for (size_t k = 0; k < kDigits; ++k)
      targets[out.size() - kDigits + k - 1] = uint8_t(numbers[size_t(i)][k]);
  }
  std::copy_n(out.begin(), tokens.size(), tokens.begin());
}
void check_needle(const Shape& s, size_t length) {
  const size_t least = size_t(s.pairs) * (2 * kQuestion + kAfter.size());
  check(length >= least, "needle with ", s.pairs, " numbers requires sequences of at least ", least,
        " tokens, not ", length);
}

}  // namespace horner::study

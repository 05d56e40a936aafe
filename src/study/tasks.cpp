#include "study/tasks.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numeric>

#include "core/check.h"
#include "core/names.h"
#include "core/random.h"

namespace horner::study {

using Tokens = std::span<int64_t>;

// n distinct numbers below `all`, in random order.
static std::vector<int64_t> drawn(const Random& random, int64_t n, int64_t all) {
  std::vector<int64_t> out(all);
  std::iota(out.begin(), out.end(), 0);
  for (int64_t i = 0; i < n; ++i) std::swap(out[i], out[i + random(all - i)]);
  out.resize(n);
  return out;
}

// Multi-query associative recall (arXiv 2312.04927): key value key value …, then again a key, its
// value, a key, its value … Keys are distinct tokens of the lower half of the vocabulary; the
// target is the value of each key of the second part, which repeats keys only after all appeared.
static void recall(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
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
static void check_recall(const Shape& s, size_t length) {
  check(s.pairs >= 1 && s.vocabulary >= 2 * s.pairs, "recall of ", s.pairs,
        " pairs requires a vocabulary of at least ", 2 * s.pairs, ", not ", s.vocabulary);
  check(length > size_t(2 * s.pairs), "recall of ", s.pairs,
        " pairs requires sequences longer than ", 2 * s.pairs, " tokens, not ", length);
}

// A random string, a separator (the last token of the vocabulary), and the string again.
static void copy(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
  const size_t n = tokens.size() / 2;
  for (size_t i = 0; i < n; ++i) tokens[i] = int64_t(random(s.vocabulary - 1));
  std::fill(tokens.begin() + n, tokens.end(), s.vocabulary - 1);  // two if the length is odd
  const size_t separator = tokens.size() - n;
  for (size_t i = 0; i < n; ++i) targets[separator + i] = tokens[i];
  for (size_t i = 0; i + 1 < n; ++i) tokens[separator + 1 + i] = tokens[i];
}
static void check_copy(const Shape& s, size_t length) {
  check(s.vocabulary >= 3, "copy requires a vocabulary of at least 3, not ", s.vocabulary);
  check(length >= 2, "copy requires sequences of at least 2 tokens, not ", length);
}

// Noise with triggers (tokens of the upper quarter of the vocabulary), each always followed by the
// same token, which the sequence chooses; the target is what follows a trigger seen before.
static void induction(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
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
static void check_induction(const Shape& s, size_t length) {
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
static int64_t mqar_values(const Shape& s) {
  return s.values > 0 ? s.values : s.vocabulary - 1 - s.vocabulary / 2;
}
static void mqar(const Shape& s, const Random& random, Tokens tokens, Tokens targets) {
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
static void practise_mqar(Shape& s, const Random& random, uint64_t index) {
  constexpr int64_t kLeast = 4;
  uint64_t sizes = 1;
  while (s.pairs >> sizes >= kLeast) ++sizes;
  const auto over = uint64_t(s.curriculum);
  const uint64_t allowed = index < over ? 1 + index * sizes / over : sizes;
  s.pairs >>= sizes - allowed + random(allowed);
  if (over > 0) s.used = 4 * s.pairs;
}
static void check_mqar(const Shape& s, size_t length) {
  const int64_t least = s.values > 0 ? s.pairs + s.values + 1 : std::max<int64_t>(2 * s.pairs, 4);
  check(s.pairs >= 1 && s.vocabulary >= least, "mqar of ", s.pairs,
        " pairs requires a vocabulary of at least ", least, ", not ", s.vocabulary);
  check(length > size_t(2 * s.pairs), "mqar of ", s.pairs, " pairs requires sequences longer than ",
        2 * s.pairs, " tokens, not ", length);
}

// A start token (2), then bits; the target is the parity of all bits so far.
static void parity(const Shape&, const Random& random, Tokens tokens, Tokens targets) {
  tokens[0] = 2;
  int64_t odd = 0;
  for (size_t t = 1; t < tokens.size(); ++t) {
    tokens[t] = int64_t(random(2));
    targets[t] = odd ^= tokens[t];
  }
}

// A start token (6), then transpositions of three things: token i exchanges what is at the places i
// and i + 1 (mod 3). The target is the permutation so far, one of 6 by lexical order.
static void s3(const Shape&, const Random& random, Tokens tokens, Tokens targets) {
  tokens[0] = 6;
  std::array<int64_t, 3> at = {0, 1, 2};
  for (size_t t = 1; t < tokens.size(); ++t) {
    const auto i = size_t(random(3));
    tokens[t] = int64_t(i);
    std::swap(at[i], at[(i + 1) % 3]);
    targets[t] = 2 * at[0] + (at[1] > at[2]);
  }
}
static void check_bits(const Shape&, size_t length) {
  constexpr size_t kLeast = 8;  // so that both splits have sequences
  check(length >= kLeast, "a sequence must have at least ", kLeast, " tokens, not ", length);
}

// clang-format off
static const Task kTasks[] = {
    {"recall",    "key-value pairs, then keys: predict the value of each", {64, 16},  false, recall, nullptr,    check_recall,    [](const Shape& s) { return 1.0 / double(s.vocabulary - s.vocabulary / 2); }},
    {"copy",      "a random string, then the same string again",           {64, 0},   false, copy, nullptr,      check_copy,      [](const Shape& s) { return 1.0 / double(s.vocabulary - 1); }},
    {"induction", "noise in which some tokens always have the same successor", {64, 4},   false, induction, nullptr, check_induction, [](const Shape& s) { return 1.0 / double(s.vocabulary - s.vocabulary / 4); }},
    {"mqar",      "key-value pairs, then keys at gaps of a power law among blanks", {1024, 64}, false, mqar, practise_mqar,  check_mqar,      [](const Shape& s) { return 1.0 / double(mqar_values(s)); }},
    {"parity",    "bits: predict the parity of all bits so far",           {3, 0},    true,  parity, nullptr,    check_bits,      [](const Shape&) { return 1.0 / 2; }},
    {"s3",        "exchanges of two of three things: predict their order so far", {7, 0}, true, s3, nullptr,     check_bits,      [](const Shape&) { return 1.0 / 6; }},
};
// clang-format on

std::span<const Task> tasks() {
  return kTasks;
}

static int64_t whole(std::string_view text, std::string_view task) {
  int64_t n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  check(error == std::errc() && end == text.data() + text.size() && n > 0 && n < (1 << 24),
        "task '", task, "': '", text, "' is not a positive integer");
  return n;
}

Chosen find_task(std::string_view text) {
  const size_t colon = text.find(':');
  const std::string name(text.substr(0, colon));
  Chosen c{.text = std::string(text), .task = nullptr, .shape = {}};
  std::vector<std::string> names = {"text"};
  for (const Task& t : kTasks) {
    names.push_back(t.name);
    if (name == t.name) c.task = &t, c.shape = t.shape;
  }
  check(name == "text" || c.task, "no task '", name, "'; possible: ", quoted(names));
  if (colon == text.npos) return c;
  for (std::string_view left = text.substr(colon + 1); !left.empty();) {
    const std::string_view part = left.substr(0, left.find(','));
    left.remove_prefix(std::min(left.size(), part.size() + 1));
    const size_t equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    std::vector<std::pair<std::string_view, int64_t*>> known;
    if (c.task && !c.task->fixed)
      known = {{"pairs", &c.shape.pairs}, {"vocabulary", &c.shape.vocabulary}};
    if (name == "mqar")
      known.insert(known.end(), {{"values", &c.shape.values}, {"curriculum", &c.shape.curriculum}});
    const auto at = std::ranges::find(known, key, &std::pair<std::string_view, int64_t*>::first);
    std::vector<std::string> possible;
    for (const auto& [each, to] : known) possible.push_back(std::string(each) + "=N");
    check(at != known.end() && equals != part.npos, "task '", text, "': no parameter '", part,
          "'; possible: ", known.empty() ? "none for '" + name + "'" : quoted(possible));
    *at->second = whole(part.substr(equals + 1), text);
  }
  return c;
}

static bool is_validation(Tokens tokens) {
  constexpr uint64_t kShare = 8;
  uint64_t hash = 0;
  for (int64_t t : tokens) hash = random_bits(hash, 0, uint64_t(t));
  return hash % kShare == 0;
}

train::Source make_source(std::string_view text, const std::string& data, uint64_t seed,
                          const std::string& validation) {
  const Chosen c = find_task(text);
  if (!c.task) return train::text_source(data, seed, validation);
  check(validation.empty(), "'validation' is a token file for the task 'text'; '", text,
        "' makes its own sequences");
  const auto fill = [c, seed](train::Split split, uint64_t index, Tokens tokens, Tokens targets) {
    c.task->check(c.shape, tokens.size());
    const uint64_t own = random_bits(seed, uint64_t(split), index);
    uint64_t drawn = 0;
    const Random random = [&](uint64_t below) { return random_bits(own, 2, drawn++) % below; };
    constexpr int kTries = 10000;
    for (int i = 0; i < kTries; ++i) {
      std::fill(targets.begin(), targets.end(), -1);
      Shape shape = c.shape;
      if (split == train::Split::train && c.task->practice) c.task->practice(shape, random, index);
      c.task->fill(shape, random, tokens, targets);
      if (is_validation(tokens) == (split == train::Split::validation)) return;
    }
    fail("task '", c.text, "' has too few different sequences of ", tokens.size(), " tokens");
  };
  return {c.text, c.shape.vocabulary, fill};
}

}  // namespace horner::study

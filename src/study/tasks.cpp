#include "study/tasks.h"

#include <algorithm>
#include <charconv>
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

// clang-format off
static const Task kTasks[] = {
    {"recall",    "key-value pairs, then keys: predict the value of each", {64, 16}, recall,    check_recall,    [](const Shape& s) { return 1.0 / double(s.vocabulary - s.vocabulary / 2); }},
    {"copy",      "a random string, then the same string again",           {64, 0},  copy,      check_copy,      [](const Shape& s) { return 1.0 / double(s.vocabulary - 1); }},
    {"induction", "noise in which some tokens always have the same successor", {64, 4},  induction, check_induction, [](const Shape& s) { return 1.0 / double(s.vocabulary - s.vocabulary / 4); }},
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
    check(c.task && equals != part.npos && (key == "pairs" || key == "vocabulary"), "task '", text,
          "': no parameter '", part,
          "'; possible: ", c.task ? "'pairs=N', 'vocabulary=N'" : "none for 'text'");
    (key == "pairs" ? c.shape.pairs : c.shape.vocabulary) = whole(part.substr(equals + 1), text);
  }
  return c;
}

static bool is_validation(Tokens tokens) {
  constexpr uint64_t kShare = 8;
  uint64_t hash = 0;
  for (int64_t t : tokens) hash = random_bits(hash, 0, uint64_t(t));
  return hash % kShare == 0;
}

train::Source make_source(std::string_view text, const std::string& data, uint64_t seed) {
  const Chosen c = find_task(text);
  if (!c.task) return train::text_source(data, seed);
  const auto fill = [c, seed](train::Split split, uint64_t index, Tokens tokens, Tokens targets) {
    c.task->check(c.shape, tokens.size());
    const uint64_t own = random_bits(seed, uint64_t(split), index);
    uint64_t drawn = 0;
    const Random random = [&](uint64_t below) { return random_bits(own, 2, drawn++) % below; };
    constexpr int kTries = 10000;
    for (int i = 0; i < kTries; ++i) {
      std::fill(targets.begin(), targets.end(), -1);
      c.task->fill(c.shape, random, tokens, targets);
      if (is_validation(tokens) == (split == train::Split::validation)) return;
    }
    fail("task '", c.text, "' has too few different sequences of ", tokens.size(), " tokens");
  };
  return {c.text, c.shape.vocabulary, fill};
}

}  // namespace horner::study

#include "study/tasks.h"

#include <algorithm>
#include <charconv>

#include "core/check.h"
#include "core/names.h"
#include "core/random.h"
#include "study/task_kinds.h"

namespace horner::study {

// clang-format off
static const Task kTasks[] = {
    {"recall",     "key-value pairs, then keys: predict the value of each",                  {64, 16},   "pairs vocabulary", recall, nullptr,    check_recall,    [](const Shape& s) { return 1.0 / double(s.vocabulary - s.vocabulary / 2); }},
    {"copy",       "a random string, then the same string again",                            {64, 0},    "vocabulary", copy, nullptr,      check_copy,      [](const Shape& s) { return 1.0 / double(s.vocabulary - 1); }},
    {"induction",  "noise in which some tokens always have the same successor",              {64, 4},    "pairs vocabulary", induction, nullptr, check_induction, [](const Shape& s) { return 1.0 / double(s.vocabulary - s.vocabulary / 4); }},
    {"mqar",       "key-value pairs, then keys at gaps of a power law among blanks",         {1024, 64}, "pairs vocabulary values curriculum", mqar, practise_mqar,  check_mqar,      [](const Shape& s) { return 1.0 / double(mqar_values(s)); }},
    {"phone_book", "names with numbers, then names: predict the digits of each",             {38, 16},   "pairs vocabulary", phone_book, nullptr, check_phone_book, [](const Shape&) { return 1.0 / 10; }},
    {"needle",     "sentences with numbers at random places of a text: predict the digits of each", {256, 4}, "pairs", needle, nullptr, check_needle, [](const Shape&) { return 1.0 / 10; }, true},
    {"mad_recall", "pairs of which keys repeat: predict the value of a key seen before",     {16, 0},    "vocabulary", mad_recall, nullptr, check_mad, [](const Shape& s) { return 1.0 / double(s.vocabulary - s.vocabulary / 2); }},
    {"mad_noisy",  "the same among noise, one pair in five",                                 {32, 0},    "vocabulary", mad_noisy_recall, nullptr, check_mad, [](const Shape& s) { return 1.0 / double(s.vocabulary / 2 - s.vocabulary / 4); }},
    {"mad_fuzzy",  "the same with keys and values of one to three tokens",                   {16, 0},    "vocabulary", mad_fuzzy_recall, nullptr, check_mad, [](const Shape& s) { return 1.0 / double(s.vocabulary - s.vocabulary / 2); }},
    {"mad_memorize", "keys whose values are the same in all sequences",                      {256, 0},   "vocabulary", mad_memorize, nullptr, check_mad, [](const Shape& s) { return 1.0 / double((s.vocabulary - 1) / 2); }},
    {"mad_compress", "a string, then blanks: predict the string",                            {16, 0},    "vocabulary", mad_compress, nullptr, check_mad, [](const Shape& s) { return 1.0 / double(s.vocabulary - 2); }},
    {"mad_select", "tokens among blanks: predict them in order",                             {16, 16},   "pairs vocabulary", mad_select, nullptr, check_mad, [](const Shape& s) { return 1.0 / double(s.vocabulary - 2); }},
    {"automata",   "words of an automaton: predict the symbol after a known beginning",      {19, 0},    "vocabulary", automata, nullptr, check_automata, [](const Shape& s) { return 1.0 / double(s.vocabulary - 1); }},
    {"parity",     "bits: predict the parity of all bits so far",                            {3, 0},     "", parity, nullptr,    check_bits,      [](const Shape&) { return 1.0 / 2; }},
    {"modular",    "sums and products modulo 5, from left to right: predict the value so far", {9, 0},   "", modular, nullptr,   check_bits,      [](const Shape&) { return 1.0 / 5; }},
    {"s3",         "exchanges of two of three things: predict their order so far",           {7, 0},     "", s3, nullptr,        check_bits,      [](const Shape&) { return 1.0 / 6; }},
    {"s5",         "permutations of five things: predict their product so far",              {121, 0},   "", s5, nullptr,        check_bits,      [](const Shape&) { return 1.0 / 120; }},
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
    const std::string_view takes = c.task ? c.task->parameters : "";
    for (const auto& [each, at] : {std::pair<std::string_view, int64_t*>("pairs", &c.shape.pairs),
                                   {"vocabulary", &c.shape.vocabulary},
                                   {"values", &c.shape.values},
                                   {"curriculum", &c.shape.curriculum}})
      if (takes.find(each) != takes.npos) known.emplace_back(each, at);
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

// The task's sequences over those of a text, whose split they have. With a file for validation they
// are the same for every seed.
static train::Source over_text(const Chosen& c, const train::Source& text, uint64_t seed,
                               bool apart) {
  const auto fill = [=](train::Split split, uint64_t index, Tokens tokens, Tokens targets) {
    c.task->check(c.shape, tokens.size());
    text.fill(split, index, tokens, targets);
    for (const int64_t t : tokens)
      check(t < c.shape.vocabulary, "task '", c.text, "' requires a text of bytes, but ", text.name,
            " has a token ", t, "; pack the text without --tokenizer");
    std::fill(targets.begin(), targets.end(), -1);
    const uint64_t own =
        random_bits(apart && split == train::Split::validation ? 0 : seed, uint64_t(split), index);
    uint64_t drawn = 0;
    c.task->fill(
        c.shape, [&](uint64_t below) { return random_bits(own, 2, drawn++) % below; }, tokens,
        targets);
  };
  return {c.text, c.shape.vocabulary, fill};
}

train::Source make_source(std::string_view text, const std::string& data, uint64_t seed,
                          const std::string& validation) {
  const Chosen c = find_task(text);
  if (!c.task || c.task->over_text) {
    const train::Source all = train::text_source(data, seed, validation);
    return c.task ? over_text(c, all, seed, !validation.empty()) : all;
  }
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

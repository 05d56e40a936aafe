#include "text/bpe_train.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <queue>
#include <unordered_map>

#include "core/check.h"
#include "text/decode.h"
#include "text/split.h"
#include "text/utf8.h"

namespace horner::text {

WordCounts::WordCounts() : pattern_(Regex::pattern("words", kGpt2Pattern)) {}

void WordCounts::add(std::string_view text) {
  check(valid_size(text) == text.size(), "invalid UTF-8 at byte ", valid_size(text));
  const auto count = [&](std::string_view word) {
    if (word.empty()) return;
    if (const auto at = index_.find(word)) {
      ++counts_[*at];
    } else {
      index_.add(word, Token(counts_.size()));
      texts_.emplace_back(word), counts_.push_back(1);
    }
  };
  for (size_t done = 0; done < text.size();) {
    const Range m = pattern_.find(text, done).value_or(Range{text.size(), text.size()});
    count(text.substr(done, m.begin - done));
    count(text.substr(m.begin, m.end - m.begin));
    done = m.end;
  }
}

// Before a space that follows a letter: no word of the pattern contains that seam.
size_t WordCounts::cut(std::string_view text, size_t most) const {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  for (size_t i = most; i < text.size(); ++i)
    if (text[i] == ' ' && letter(text[i - 1])) return i;
  return text.size();
}

std::vector<WordCounts::Word> WordCounts::words() const {
  std::vector<Word> out;
  for (size_t i = 0; i < texts_.size(); ++i) out.push_back({texts_[i], counts_[i]});
  std::sort(out.begin(), out.end(), [](const Word& a, const Word& b) { return a.text < b.text; });
  return out;
}

namespace {

using Pair = std::pair<Token, Token>;
struct PairHash {
  size_t operator()(const Pair& p) const {
    return size_t((uint64_t(p.first) << 32 | p.second) * 0x9E3779B97F4A7C15u);
  }
};

// A pair, how often it occurs, and the words in which it may occur (each once per appearance).
struct Found {
  int64_t count = 0;
  std::vector<uint32_t> words;
};

struct Candidate {
  int64_t count;
  Pair pair;
  // The most frequent first; of equals the pair of earlier tokens.
  bool operator<(const Candidate& o) const {
    return count != o.count ? count < o.count : pair > o.pair;
  }
};

struct Trainer {
  std::vector<std::vector<Token>> words;
  std::vector<int64_t> counts;
  std::unordered_map<Pair, Found, PairHash> pairs;
  std::priority_queue<Candidate> queue;

  void note(Pair p, size_t word) {
    Found& f = pairs[p];
    f.count += counts[word];
    if (f.words.empty() || f.words.back() != uint32_t(word)) f.words.push_back(uint32_t(word));
  }
  void begin() {
    for (size_t w = 0; w < words.size(); ++w)
      for (size_t i = 0; i + 1 < words[w].size(); ++i) note({words[w][i], words[w][i + 1]}, w);
    for (const auto& [pair, found] : pairs) queue.push({found.count, pair});
  }

  // The most frequent pair; false if none is left.
  bool next(Pair& out) {
    while (!queue.empty()) {
      const Candidate top = queue.top();
      queue.pop();
      const auto at = pairs.find(top.pair);
      if (at == pairs.end() || at->second.count <= 0) continue;
      if (at->second.count != top.count) {  // changed since it was queued
        queue.push({at->second.count, top.pair});
        continue;
      }
      out = top.pair;
      return true;
    }
    return false;
  }

  // Replaces the pair by `joined` everywhere, from the left of each word.
  void merge(Pair p, Token joined) {
    const std::vector<uint32_t> where = std::move(pairs[p].words);
    pairs.erase(p);
    std::vector<Pair> fresh;
    for (const uint32_t w : where) merge_in(w, p, joined, fresh);
    std::sort(fresh.begin(), fresh.end());
    fresh.erase(std::unique(fresh.begin(), fresh.end()), fresh.end());
    for (const Pair& each : fresh)
      if (const auto at = pairs.find(each); at != pairs.end() && at->second.count > 0)
        queue.push({at->second.count, each});
  }
  void merge_in(uint32_t w, Pair p, Token joined, std::vector<Pair>& fresh) {
    std::vector<Token>& word = words[w];
    const auto forget = [&](Pair old) {
      if (const auto at = pairs.find(old); at != pairs.end()) at->second.count -= counts[w];
    };
    const auto add = [&](Pair now) { note(now, w), fresh.push_back(now); };
    size_t to = 0;
    for (size_t i = 0; i < word.size(); ++i) {
      if (i + 1 == word.size() || word[i] != p.first || word[i + 1] != p.second) {
        word[to++] = word[i];
        continue;
      }
      if (to > 0) forget({word[to - 1], p.first}), add({word[to - 1], joined});
      if (i + 2 < word.size()) forget({p.second, word[i + 2]}), add({joined, word[i + 2]});
      word[to++] = joined, ++i;
    }
    word.resize(to);
  }
};

// The printable character of each byte, in UTF-8.
std::vector<std::string> characters() {
  std::vector<std::string> out(256);
  for (char32_t c = 0; c < 512; ++c) {
    std::string text, byte;
    append(text, c);
    if (to_bytes(text, byte) && byte.size() == 1) out[uint8_t(byte[0])] = text;
  }
  return out;
}

nlohmann::ordered_json tokenizer_json(const std::vector<std::string>& names,
                                      const std::vector<Pair>& merges,
                                      const std::vector<std::string>& special) {
  using Json = nlohmann::ordered_json;
  Json vocabulary = Json::object(), pairs = Json::array(), added = Json::array();
  // Not by name: an ordered object looks for each name among all others.
  for (size_t i = 0; i < names.size(); ++i)
    vocabulary.get_ref<Json::object_t&>().emplace_back(names[i], i);
  for (const auto& [a, b] : merges) pairs.push_back({names[a], names[b]});
  for (size_t i = 0; i < special.size(); ++i)
    added.push_back({{"id", i},
                     {"content", special[i]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  const auto byte_level = [](bool space) {
    return Json{{"type", "ByteLevel"},
                {"add_prefix_space", space},
                {"trim_offsets", true},
                {"use_regex", true}};
  };
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level(false)},
          {"post_processor", nullptr},
          {"decoder", byte_level(true)},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocabulary},
            {"merges", pairs}}}};
}

}  // namespace

std::string trained_tokenizer(const WordCounts& counted, size_t vocabulary,
                              const std::vector<std::string>& special) {
  const size_t least = 256 + special.size();
  check(vocabulary >= least, "a vocabulary of bytes and ", special.size(),
        " special tokens has at least ", least, " tokens, not ", vocabulary);
  std::vector<std::string> names = special;
  const std::vector<std::string> of_byte = characters();
  std::vector<std::pair<std::string, size_t>> bytes;  // in the order of their characters
  for (size_t b = 0; b < 256; ++b) bytes.emplace_back(of_byte[b], b);
  std::sort(bytes.begin(), bytes.end());
  std::vector<Token> token_of(256);
  for (const auto& [name, b] : bytes) token_of[b] = Token(names.size()), names.push_back(name);
  std::unordered_map<std::string, Token> known;
  for (size_t i = 0; i < names.size(); ++i) known.emplace(names[i], Token(i));
  Trainer t;
  for (const WordCounts::Word& word : counted.words()) {
    t.words.emplace_back();
    for (const char c : word.text) t.words.back().push_back(token_of[uint8_t(c)]);
    t.counts.push_back(int64_t(word.count));
  }
  t.begin();
  std::vector<Pair> merges;
  for (Pair best; names.size() < vocabulary && t.next(best);) {
    const std::string name = names[best.first] + names[best.second];
    const auto [at, fresh] = known.emplace(name, Token(names.size()));
    if (fresh) names.push_back(name);
    merges.push_back(best);
    t.merge(best, at->second);
  }
  return tokenizer_json(names, merges, special).dump(2) + "\n";
}

}  // namespace horner::text

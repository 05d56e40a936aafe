// Byte-pair encoding. Short words are merged by a linear search for the lowest rank, long ones by a
// heap.
#include "text/bpe.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <tuple>

#include "core/check.h"
#include "text/utf8.h"

namespace horner::text {

namespace {

constexpr uint64_t kNothing = ~uint64_t(0);
constexpr size_t kUncommon = 129;
constexpr char32_t kSpace = 0x2581;  // ▁
constexpr size_t kCacheSlots = 1 << 18, kCacheMost = kCacheSlots / 2, kLongestCached = 64;
constexpr size_t kShort = 40;  // up to so many symbols a linear search is faster than a heap

uint64_t mixed(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

size_t common(char32_t c) {
  return c < 128 ? c : c == kSpace ? 128 : kUncommon;
}

}  // namespace

uint64_t hash_of(std::string_view s) {
  constexpr uint64_t kA = 0x9E3779B97F4A7C15u, kB = 0xD6E8FEB86659FD93u;
  uint64_t h = s.size() * kA, part = 0;
  const char* p = s.data();
  size_t n = s.size();
  for (; n > 8; p += 8, n -= 8) {
    std::memcpy(&part, p, 8);
    h = mixed(h ^ part, kB);
  }
  part = 0;
  // The last 0 to 8 bytes, by copies of fixed size: each is one instruction.
  if (n >= 4) {
    uint32_t low, high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + n - 4, 4);
    part = uint64_t(high) << 32 | low;
  } else if (n > 0) {
    part = uint64_t(uint8_t(p[0])) | uint64_t(uint8_t(p[n / 2])) << 8 |
           uint64_t(uint8_t(p[n - 1])) << 16;
  }
  return mixed(h ^ part, kA);
}

void TextTable::reserve(size_t keys) {
  size_t size = 16;
  while (size < keys * 2) size *= 2;
  std::vector<Slot> old(size, Slot{0, 0, 0, kNone});
  old.swap(slots_);
  for (const Slot& s : old)
    if (s.value != kNone) {
      const std::string_view key = std::string_view(keys_).substr(s.at, s.size);
      slots_[slot(key, hash_of(key))] = s;
    }
}

size_t TextTable::slot(std::string_view key, uint64_t hash) const {
  size_t i = hash & (slots_.size() - 1);
  while (slots_[i].value != kNone &&
         (slots_[i].hash != uint32_t(hash >> 32) || slots_[i].size != key.size() ||
          std::memcmp(keys_.data() + slots_[i].at, key.data(), key.size()) != 0))
    i = (i + 1) & (slots_.size() - 1);
  return i;
}

bool TextTable::add(std::string_view key, Token value) {
  if (used_ * 2 >= slots_.size()) reserve(used_ * 2 + 8);
  const uint64_t hash = hash_of(key);
  const size_t i = slot(key, hash);
  if (slots_[i].value != kNone) return false;
  check(keys_.size() + key.size() < UINT32_MAX, "the vocabulary exceeds 4 GB");
  slots_[i] = {uint32_t(hash >> 32), uint32_t(keys_.size()), uint32_t(key.size()), value};
  keys_ += key;
  ++used_;
  return true;
}

std::optional<Token> TextTable::find(std::string_view key) const {
  if (slots_.empty()) return std::nullopt;
  const Token value = slots_[slot(key, hash_of(key))].value;
  return value == kNone ? std::nullopt : std::optional(value);
}

PairTable::PairTable(size_t most) {
  size_t size = 16;
  while (size < most * 2) size *= 2;
  slots_.assign(size, {kNothing, kNothing});
  mask_ = size - 1;
}

void PairTable::set(uint32_t a, uint32_t b, uint64_t value) {
  const uint64_t key = uint64_t(a) << 32 | b;
  size_t i = mixed(key, 0x9E3779B97F4A7C15u) & mask_;
  while (slots_[i].first != kNothing && slots_[i].first != key) i = (i + 1) & mask_;
  slots_[i] = {key, value};
}

uint64_t PairTable::get(uint32_t a, uint32_t b) const {
  const uint64_t key = uint64_t(a) << 32 | b;
  size_t i = mixed(key, 0x9E3779B97F4A7C15u) & mask_;
  while (slots_[i].first != key) {
    if (slots_[i].first == kNothing) return kNothing;
    i = (i + 1) & mask_;
  }
  return slots_[i].second;
}

WordCache::WordCache() : slots_(kCacheSlots) {}

const Token* WordCache::find(std::string_view word, size_t hash, size_t& count) const {
  for (size_t i = hash % kCacheSlots; slots_[i].word_size > 0; i = (i + 1) % kCacheSlots) {
    const Slot& s = slots_[i];
    if (s.hash != hash || s.word_size != word.size() ||
        std::memcmp(words_.data() + s.word, word.data(), word.size()) != 0)
      continue;
    count = s.count;
    return tokens_.data() + s.tokens;
  }
  return nullptr;
}

void WordCache::add(std::string_view word, size_t hash, const Token* tokens, size_t count) {
  if (used_ == kCacheMost) {
    std::fill(slots_.begin(), slots_.end(), Slot{});
    words_.clear();
    tokens_.clear();
    used_ = 0;
  }
  size_t i = hash % kCacheSlots;
  while (slots_[i].word_size > 0) i = (i + 1) % kCacheSlots;
  slots_[i] = {hash, uint32_t(words_.size()), uint32_t(word.size()), uint32_t(tokens_.size()),
               uint32_t(count)};
  words_ += word;
  tokens_.insert(tokens_.end(), tokens, tokens + count);
  ++used_;
}

static void note_join(Bpe& bpe, const std::string& a, const std::string& b) {
  size_t last = a.size() - 1, first = 0;
  while ((a[last] & 0xC0) == 0x80) --last;
  const char32_t left = next(a, last), right = next(b, first);
  if (common(left) != kUncommon && common(right) != kUncommon)
    bpe.joined_common[common(left)][common(right)] = true;
  else
    bpe.joined.set(left, right, 1);
}

void finish(Bpe& bpe, const std::vector<std::pair<std::string, Token>>& vocabulary,
            const std::vector<std::pair<std::string, std::string>>& merges) {
  bpe.vocabulary.reserve(vocabulary.size());
  bpe.of_character.assign(size_t(kSpace) + 1, kNone);
  for (const auto& [text, id] : vocabulary) {
    check(bpe.vocabulary.add(text, id), "model.vocab: duplicate token '", lossy(text), "'");
    if (text.empty() || text.size() > 4) continue;
    size_t at = 0;
    const char32_t c = bpe.bytes ? (at = 1, static_cast<unsigned char>(text[0])) : next(text, at);
    if (at != text.size()) continue;
    if (c >= bpe.of_character.size()) bpe.of_character.resize(size_t(c) + 1, kNone);
    bpe.of_character[c] = id;
  }
  const auto id = [&](std::string_view text, size_t rank) {
    const std::optional<Token> found = bpe.vocabulary.find(text);
    check(found.has_value(), "model.merges: merge ", rank, " requires token '", lossy(text),
          "', which is not in model.vocab");
    return *found;
  };
  bpe.merges = PairTable(merges.size());
  bpe.joined = PairTable(bpe.bytes ? 0 : merges.size());
  std::string whole;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [a, b] = merges[rank];
    check(!a.empty() && !b.empty(), "model.merges: merge ", rank, " has an empty part");
    whole.assign(a).append(b);
    bpe.merges.set(id(a, rank), id(b, rank), uint64_t(rank) << 32 | id(whole, rank));
    if (!bpe.bytes) note_join(bpe, a, b);
  }
}

namespace {

// The initial tokens of a word.
void symbols_of(const Bpe& bpe, std::string_view word, std::vector<Token>& out) {
  if (bpe.bytes) {
    for (const char byte : word)
      if (const Token t = bpe.of_character[static_cast<unsigned char>(byte)]; t != kNone)
        out.push_back(t);
      else if (bpe.unknown != kNone &&
               !(bpe.fuse_unknown && !out.empty() && out.back() == bpe.unknown))
        out.push_back(bpe.unknown);
    return;
  }
  bool waiting = false;  // an unknown character was seen, its token is not written yet
  for (size_t at = 0; at < word.size();) {
    const size_t begin = at;
    const char32_t c = next(word, at);
    const Token t = c < bpe.of_character.size() ? bpe.of_character[c] : kNone;
    if (t != kNone) {
      if (waiting) out.push_back(bpe.unknown);
      waiting = false;
      out.push_back(t);
      continue;
    }
    if (bpe.fallback) {
      const auto byte = [&](size_t i) { return bpe.of_byte[static_cast<unsigned char>(word[i])]; };
      bool all = true;
      for (size_t i = begin; i < at; ++i) all = all && byte(i) != kNone;
      for (size_t i = begin; all && i < at; ++i) out.push_back(byte(i));
      if (all) continue;
    }
    if (bpe.unknown == kNone) continue;
    if (waiting && !bpe.fuse_unknown) out.push_back(bpe.unknown);
    waiting = true;
  }
  if (waiting) out.push_back(bpe.unknown);
}

void merge_short(const Bpe& bpe, std::vector<Token>& s) {
  uint64_t ranks[kShort];  // of each symbol with the next
  size_t n = s.size();
  for (size_t i = 0; i + 1 < n; ++i) ranks[i] = bpe.merges.get(s[i], s[i + 1]);
  while (n > 1) {
    const size_t i = size_t(std::min_element(ranks, ranks + n - 1) - ranks);
    if (ranks[i] == kNothing) break;
    s[i] = Token(ranks[i]);
    std::copy(s.begin() + ptrdiff_t(i) + 2, s.begin() + ptrdiff_t(n), s.begin() + ptrdiff_t(i) + 1);
    std::copy(ranks + i + 1, ranks + n - 1, ranks + i);
    --n;
    if (i > 0) ranks[i - 1] = bpe.merges.get(s[i - 1], s[i]);
    if (i + 1 < n) ranks[i] = bpe.merges.get(s[i], s[i + 1]);
  }
  s.resize(n);
}

void merge_long(const Bpe& bpe, std::vector<Token>& s) {
  struct Join {
    uint64_t merge;
    size_t at;
    Token left, right;
    bool operator<(const Join& o) const { return std::tie(o.merge, o.at) < std::tie(merge, at); }
  };
  constexpr size_t kEnd = SIZE_MAX;
  const size_t n = s.size();
  std::vector<size_t> after(n), before(n);
  std::priority_queue<Join> queue;
  const auto offer = [&](size_t i, size_t j) {
    const uint64_t merge = bpe.merges.get(s[i], s[j]);
    if (merge != kNothing) queue.push({merge, i, s[i], s[j]});
  };
  for (size_t i = 0; i < n; ++i) {
    before[i] = i == 0 ? kEnd : i - 1;
    after[i] = i + 1 == n ? kEnd : i + 1;
    if (i + 1 < n) offer(i, i + 1);
  }
  while (!queue.empty()) {
    const Join top = queue.top();
    queue.pop();
    const size_t j = s[top.at] == top.left ? after[top.at] : kEnd;
    if (j == kEnd || s[j] != top.right) continue;  // one of them is already merged
    s[top.at] = Token(top.merge);
    s[j] = kNone;
    after[top.at] = after[j];
    if (after[j] != kEnd) before[after[j]] = top.at;
    if (before[top.at] != kEnd) offer(before[top.at], top.at);
    if (after[top.at] != kEnd) offer(top.at, after[top.at]);
  }
  std::erase(s, kNone);
}

void encode_cut(const Bpe& bpe, WordCache& cache, std::string_view word, std::vector<Token>& out) {
  const size_t hash = hash_of(word);
  size_t count = 0;
  if (const Token* known = cache.find(word, hash, count)) {
    out.insert(out.end(), known, known + count);
    return;
  }
  thread_local std::vector<Token> symbols;
  symbols.clear();
  symbols_of(bpe, word, symbols);
  if (symbols.size() <= kShort)
    merge_short(bpe, symbols);
  else
    merge_long(bpe, symbols);
  out.insert(out.end(), symbols.begin(), symbols.end());
  if (word.size() <= kLongestCached) cache.add(word, hash, symbols.data(), symbols.size());
}

bool may_join(const Bpe& bpe, char32_t a, char32_t b) {
  const size_t i = common(a), j = common(b);
  if (i < kUncommon && j < kUncommon && bpe.of_character[a] != kNone &&
      bpe.of_character[b] != kNone)
    return bpe.joined_common[i][j];
  const auto known = [&](char32_t c) {
    return c < bpe.of_character.size() && bpe.of_character[c] != kNone;
  };
  return !known(a) || !known(b) || bpe.joined.get(a, b) != kNothing;
}

}  // namespace

void encode(const Bpe& bpe, WordCache& cache, std::string_view word, std::vector<Token>& out) {
  if (word.empty()) return;
  if (bpe.ignore_merges) {
    if (const auto whole = bpe.vocabulary.find(word)) return out.push_back(*whole);
  }
  if (bpe.bytes) return encode_cut(bpe, cache, word, out);
  size_t begin = 0, at = 0;
  char32_t last = next(word, at);
  while (at < word.size()) {
    const size_t here = at;
    const char32_t c = next(word, at);
    if (!may_join(bpe, last, c)) {
      encode_cut(bpe, cache, word.substr(begin, here - begin), out);
      begin = here;
    }
    last = c;
  }
  encode_cut(bpe, cache, word.substr(begin), out);
}

}  // namespace horner::text

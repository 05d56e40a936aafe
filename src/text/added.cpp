// Added tokens by a trie, searched only where the first two bytes match.
#include "text/added.h"

#include "text/utf8.h"

namespace horner::text {

namespace {

constexpr uint64_t kNowhere = ~uint64_t(0);

unsigned byte(std::string_view text, size_t at) {
  return static_cast<unsigned char>(text[at]);
}

bool is_space(std::string_view character) {
  thread_local const Regex space = Regex::own("\\p{White_Space}");
  return space.find(character, 0).has_value();
}
bool is_word(std::string_view character) {
  thread_local const Regex word =
      Regex::own("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]");
  return word.find(character, 0).has_value();
}

std::string_view last_character(std::string_view text) {
  size_t at = text.size() - 1;
  while ((text[at] & 0xC0) == 0x80) --at;
  return text.substr(at);
}
std::string_view first_character(std::string_view text) {
  size_t at = 0;
  next(text, at);
  return text.substr(0, at);
}

bool stands_alone(std::string_view text, Range r) {
  const std::string_view before = text.substr(0, r.begin), after = text.substr(r.end);
  return (before.empty() || !is_word(last_character(before))) &&
         (after.empty() || !is_word(first_character(after)));
}

}  // namespace

AddedFinder::AddedFinder(std::vector<Pattern> patterns) : patterns_(std::move(patterns)) {
  size_t bytes = 0;
  for (const Pattern& p : patterns_) bytes += p.text.size();
  next_ = PairTable(bytes);
  ends_ = {0};
  for (size_t i = 0; i < patterns_.size(); ++i) {
    const std::string& text = patterns_[i].text;
    if (text.empty()) continue;
    uint32_t node = 0;
    for (size_t at = 0; at < text.size(); ++at) {
      uint64_t child = next_.get(node, byte(text, at));
      if (child == kNowhere) {
        child = ends_.size();
        ends_.push_back(0);
        next_.set(node, byte(text, at), child);
      }
      node = uint32_t(child);
    }
    if (ends_[node] == 0) ends_[node] = uint32_t(i) + 1;  // of equal patterns the first wins
    for (unsigned second = 0; second < 256; ++second)
      if (text.size() == 1 || second == byte(text, 1)) starts_.set(byte(text, 0) << 8 | second);
  }
}

const AddedFinder::Pattern* AddedFinder::longest(std::string_view text) const {
  uint64_t node = 0;
  uint32_t found = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    node = next_.get(uint32_t(node), byte(text, at));
    if (node == kNowhere) break;
    if (ends_[node] > 0) found = ends_[node];
  }
  return found > 0 ? &patterns_[found - 1] : nullptr;
}

std::optional<AddedFinder::Match> AddedFinder::find(std::string_view text, size_t from,
                                                    size_t taken) const {
  if (starts_.none()) return std::nullopt;
  for (size_t at = from; at < text.size(); ++at) {
    const unsigned second = at + 1 < text.size() ? byte(text, at + 1) : 0;
    if (at + 1 < text.size() && !starts_.test(byte(text, at) << 8 | second)) continue;
    const Pattern* p = longest(text.substr(at));
    if (!p) continue;
    Range r{at, at + p->text.size()};
    if (p->token.single_word && !stands_alone(text, r)) {
      at = r.end - 1;
      continue;
    }
    while (p->token.lstrip && r.begin > taken && is_space(last_character(text.substr(0, r.begin))))
      r.begin -= last_character(text.substr(0, r.begin)).size();
    while (p->token.rstrip && r.end < text.size() && is_space(first_character(text.substr(r.end))))
      r.end += first_character(text.substr(r.end)).size();
    return Match{&p->token, r, at + p->text.size()};
  }
  return std::nullopt;
}

}  // namespace horner::text

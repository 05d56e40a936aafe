// The splitters: each passes its pieces to the next one, without a copy if the text is unchanged.
#include "text/split.h"

namespace horner::text {

namespace {

// The next match; with `contiguous`, extended by the matches that follow without a gap.
std::optional<Range> find(const Split& s, std::string_view text, size_t from) {
  std::optional<Range> m = s.pattern.find(text, from);
  while (m && s.behaviour == Behaviour::contiguous && m->end < text.size()) {
    const std::optional<Range> more = s.pattern.find(text, m->end);
    if (!more || more->begin != m->end) break;
    m->end = more->end;
  }
  return m;
}

template <class F>
void pieces(const Split& s, std::string_view text, Place place, F&& give) {
  const bool removed = s.behaviour == Behaviour::removed;
  size_t done = 0;
  const auto cut = [&](size_t end, bool match) {
    const Place here{.first = place.first && done == 0, .continues = place.continues};
    if (end > done && !(removed && match != s.invert)) give(text.substr(done, end - done), here);
    done = end;
  };
  for (size_t at = 0; at < text.size();) {
    const std::optional<Range> m = find(s, text, at);
    if (!m) break;
    at = m->end;
    if (s.behaviour != Behaviour::merged_with_previous) cut(m->begin, false);
    if (s.behaviour != Behaviour::merged_with_next) cut(m->end, true);
  }
  cut(text.size(), false);
}

template <class F>
void pieces(const ByteLevel& b, std::string_view text, Place place, F&& give) {
  std::string spaced;
  if (b.prefix_space && !place.continues && !text.starts_with(' ')) {
    spaced.append(" ").append(text);
    text = spaced;
  }
  if (!b.pattern) return give(text, place);
  size_t done = 0;
  while (done < text.size()) {
    const Range m = b.pattern->find(text, done).value_or(Range{text.size(), text.size()});
    if (m.begin > done) give(text.substr(done, m.begin - done), place);
    if (m.end > m.begin) give(text.substr(m.begin, m.end - m.begin), place);
    done = m.end;
  }
}

template <class F>
void pieces(const Metaspace& m, std::string_view text, Place place, F&& give) {
  std::string changed;
  changed.reserve(text.size() + text.size() / 2);
  for (const char c : text)
    if (c == ' ')
      changed += m.replacement;
    else
      changed += c;
  const bool wanted = m.prepend == Scheme::always || (m.prepend == Scheme::first && place.first);
  if (wanted && !place.continues && !changed.starts_with(m.replacement))
    changed.insert(0, m.replacement);
  const std::string_view all = changed;
  size_t done = 0;
  while (m.split && done < all.size()) {
    const size_t at = all.find(m.replacement, done + 1);
    if (at == std::string_view::npos) break;
    give(all.substr(done, at - done), place);
    done = at;
  }
  if (done < all.size()) give(all.substr(done), place);
}

}  // namespace

void encode_words(std::span<const Splitter> steps, std::string_view text, Place place,
                  const Bpe& bpe, WordCache& cache, std::vector<Token>& out) {
  if (steps.empty()) return encode(bpe, cache, text, out);
  const auto rest = steps.subspan(1);
  const auto give = [&](std::string_view piece, Place here) {
    if (rest.empty())
      encode(bpe, cache, piece, out);
    else
      encode_words(rest, piece, here, bpe, cache, out);
  };
  std::visit([&](const auto& step) { pieces(step, text, place, give); }, steps[0]);
}

}  // namespace horner::text

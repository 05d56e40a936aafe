// The tokenizer: added tokens, normalizers, splitters and byte-pair encoding, in that order.
#include "text/tokenizer.h"

#include <algorithm>

#include "core/check.h"
#include "text/model.h"
#include "text/utf8.h"

namespace horner::text {

// Mutable state of encoding; each Tokenizer has its own.
struct Workspace {
  std::vector<Normalizer> normalizers;
  std::vector<Splitter> splitters;
  WordCache words;
  std::string normalized;
};

static std::unique_ptr<Workspace> workspace(const Model& m) {
  if (m.raw_bytes) return nullptr;
  return std::make_unique<Workspace>(Workspace{m.normalizers, m.splitters, {}, {}});
}

// Appends the added tokens in `text` to `out`, and calls `encode` for the pieces between them.
template <class F>
static void encode_between(const AddedFinder& added, std::string_view text, Place place,
                           std::vector<Token>& out, F encode) {
  size_t done = 0, next = 0;
  while (true) {
    const auto match = added.find(text, next, done);
    const size_t end = match ? match->range.begin : text.size();
    const Place here{.first = place.first && done == 0, .continues = place.continues && done == 0};
    if (end > done) encode(text.substr(done, end - done), here);
    if (!match) break;
    out.push_back(match->token->id);
    done = match->range.end;
    next = match->next;
  }
}

static std::filesystem::path file_at(const std::filesystem::path& path) {
  return std::filesystem::is_directory(path) ? path / "tokenizer.json" : path;
}

Tokenizer::Tokenizer() : model_(std::make_shared<Model>(Model{.raw_bytes = true})) {}

Tokenizer::Tokenizer(const std::filesystem::path& path)
    : model_(std::make_shared<Model>(read_model(file_at(path)))), work_(workspace(*model_)) {}

Tokenizer::Tokenizer(const Tokenizer& other)
    : model_(other.model_), work_(workspace(*other.model_)) {}

Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer& Tokenizer::operator=(Tokenizer other) noexcept {
  std::swap(model_, other.model_);
  std::swap(work_, other.work_);
  return *this;
}

void Tokenizer::encode(std::string_view text, std::vector<Token>& out, EncodeOptions o) const {
  const Model& m = *model_;
  if (m.raw_bytes) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
    out.insert(out.end(), bytes, bytes + text.size());
    return;
  }
  const size_t valid = valid_size(text);
  check(valid == text.size(), "the text is not valid UTF-8 at byte ", valid);
  if (o.special) out.insert(out.end(), m.before.begin(), m.before.end());
  Workspace& w = *work_;
  const Place whole{.first = true, .continues = o.continues};
  encode_between(m.in_raw, text, whole, out, [&](std::string_view raw, Place at) {
    const std::string_view piece = normalized(w.normalizers, raw, at.continues, w.normalized);
    encode_between(m.in_normalized, piece, at, out, [&](std::string_view part, Place here) {
      encode_words(w.splitters, part, here, m.bpe, w.words, out);
    });
  });
  if (o.special) out.insert(out.end(), m.after.begin(), m.after.end());
}

std::vector<Token> Tokenizer::encode(std::string_view text, EncodeOptions o) const {
  std::vector<Token> out;
  encode(text, out, o);
  return out;
}

std::string Tokenizer::decode(std::span<const Token> tokens, bool skip_special) const {
  if (model_->raw_bytes) {
    std::string bytes;
    for (const Token t : tokens) {
      check(t < 256, "token ", t, " is not a byte");
      bytes += char(t);
    }
    return lossy(bytes);
  }
  std::vector<std::string> parts;
  for (const Token t : tokens)
    if (t < model_->names.size() && model_->exists[t] && !(skip_special && model_->special[t]))
      parts.push_back(model_->names[t]);
  return decoded(model_->decoders, std::move(parts));
}

bool Tokenizer::is_bytes() const {
  return model_->raw_bytes;
}

size_t Tokenizer::size() const {
  return model_->raw_bytes ? 256 : model_->names.size();
}

std::optional<Token> Tokenizer::find(std::string_view token) const {
  if (model_->raw_bytes)
    return token.size() == 1 ? std::optional(Token(static_cast<unsigned char>(token[0])))
                             : std::nullopt;
  return model_->by_name.find(token);
}

std::string Tokenizer::name(Token t) const {
  if (model_->raw_bytes) return t < 256 ? std::string(1, char(t)) : "";
  return t < model_->names.size() ? model_->names[t] : "";
}

bool Tokenizer::is_special(Token t) const {
  return t < model_->special.size() && model_->special[t];
}

std::string DecodeStream::add(Token t) {
  constexpr size_t kMostWaiting = 8;  // a character has at most 4 bytes: more is invalid
  tokens_.push_back(t);
  const std::string all = tokenizer_.decode(tokens_);
  if (all.ends_with("\xEF\xBF\xBD") && tokens_.size() - context_ < kMostWaiting) return "";
  return rest();
}

std::string DecodeStream::rest() {
  const size_t given = tokenizer_.decode(std::span(tokens_).first(context_)).size();
  const std::string all = tokenizer_.decode(tokens_);
  tokens_.erase(tokens_.begin(), tokens_.begin() + ptrdiff_t(context_));
  context_ = tokens_.size();
  return all.size() > given ? all.substr(given) : "";
}

// Tries white space first, then any character. A cut is safe if the text around it gives the same
// tokens with and without it. Text farther away does not matter: every splitter continues where its
// last word ended.
size_t safe_cut(const Tokenizer& t, std::string_view text, size_t most) {
  constexpr size_t kAround = 1024, kMostTries = 4096;
  if (text.size() <= most + kAround || most < 2) return text.size();
  if (t.is_bytes()) return most;
  const auto starts = [&](size_t at) { return (text[at] & 0xC0) != 0x80; };
  const auto safe = [&](size_t at) {
    size_t begin = at - std::min(at, kAround), end = std::min(at + kAround, text.size());
    while (begin < at && !starts(begin)) ++begin;
    while (end < text.size() && !starts(end)) --end;
    const EncodeOptions o{.special = false, .continues = true};
    std::vector<Token> parts = t.encode(text.substr(begin, at - begin), o);
    t.encode(text.substr(at, end - at), parts, o);
    return parts == t.encode(text.substr(begin, end - begin), o);
  };
  const auto space = [&](size_t at) { return text[at] == ' ' || text[at] == '\n'; };
  for (const bool anywhere : {false, true})
    for (size_t at = most, tries = 0; at > most / 2 && tries < kMostTries; --at) {
      if (!starts(at) || (!anywhere && (!space(at) || space(at - 1)))) continue;
      if (safe(at)) return at;
      ++tries;
    }
  return text.size();
}

}  // namespace horner::text

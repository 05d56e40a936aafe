// horner data info: inspect a token file.
#include <algorithm>

#include "cli/data.h"
#include "cli/options.h"
#include "cli/table.h"
#include "text/token_file.h"

namespace horner::cli {

namespace {

using text::Token;

struct Seen {
  Token smallest = 0, largest = 0;
  size_t different = 0;
};

Seen look(const text::TokenFile& f) {
  constexpr size_t kPart = 1 << 16;
  constexpr Token kMostCounted = 1 << 26;  // above any vocabulary: not counted
  std::vector<bool> seen;
  std::vector<int64_t> part(kPart);
  Seen out{.smallest = f.size > 0 ? text::token_at(f, 0) : 0};
  for (size_t at = 0; at < f.size; at += kPart) {
    const std::span<int64_t> here(part.data(), std::min(kPart, f.size - at));
    text::copy_tokens(f, at, here);
    for (const int64_t token : here) {
      const Token t = Token(token);
      out.smallest = std::min(out.smallest, t);
      out.largest = std::max(out.largest, t);
      if (t >= kMostCounted) continue;
      if (t >= seen.size()) seen.resize(size_t(t) + 1);
      if (!seen[t]) ++out.different;
      seen[t] = true;
    }
    f.file->forget(f.offset + at * f.width);
  }
  return out;
}

// The first tokens as text; none when these are not the tokenizer's.
std::string first_text(const text::TokenFile& f, const text::Tokenizer& t, size_t shown) {
  std::vector<Token> first;
  for (size_t i = 0; i < std::min(shown, f.size); ++i) first.push_back(text::token_at(f, i));
  for (const Token token : first)
    if (token >= t.size()) return "";
  return t.decode(first, false);
}

std::string on_one_line(const std::string& text) {
  std::string out;
  for (const char c : text)
    if (c == '\n')
      out += "↵";
    else if (static_cast<unsigned char>(c) < ' ')
      out += "·";
    else
      out += c;
  return out;
}

}  // namespace

Outcome describe_tokens(const TokensOptions& o) {
  const text::Tokenizer tokenizer = tokenizer_at(o.tokenizer);
  Json all = Json::array();
  for (const std::string& path : o.files) {
    const text::TokenFile f = text::open_tokens(path);
    const Seen seen = look(f);
    const std::string text = first_text(f, tokenizer, o.shown);
    const bool fits = f.size == 0 || seen.largest < tokenizer.size();
    if (o.json) {
      all.push_back({{"file", path},
                     {"layout", f.layout},
                     {"bits", f.width * 8},
                     {"tokens", f.size},
                     {"different", seen.different},
                     {"smallest", seen.smallest},
                     {"largest", seen.largest},
                     {"vocabulary", tokenizer.size()},
                     {"fits", fits},
                     {"text", text}});
      continue;
    }
    std::cout << bold(path) << "\n  layout      " << f.layout << ", " << f.width * 8
              << " bits per token\n  tokens      " << f.size << "\n  vocabulary  " << seen.different
              << " different ones, " << seen.smallest << " to " << seen.largest << "\n";
    if (!fits)
      std::cout << "  " << red("does not fit this tokenizer") << ", which has " << tokenizer.size()
                << " tokens" << (o.tokenizer.empty() ? " (bytes); pass --tokenizer" : "") << "\n";
    if (!text.empty()) std::cout << "  begins      " << on_one_line(text) << "\n";
  }
  return o.json ? print_json(all) : Outcome::fine;
}

}  // namespace horner::cli

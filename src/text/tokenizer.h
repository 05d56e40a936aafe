// Text to tokens and back: bytes, or a Hugging Face tokenizer.json with byte-pair encoding.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace horner::text {

using Token = uint32_t;

struct Model;
struct Workspace;

struct EncodeOptions {
  bool special = true;     // add the template's tokens around the text
  bool continues = false;  // the text continues an earlier one: nothing is prepended
};

// Copies share what was read from the file. Not thread-safe: give each thread a copy.
class Tokenizer {
 public:
  Tokenizer();  // a token is a byte
  // `path`: a tokenizer.json, or a folder with one. An unsupported feature is an error that names
  // the field: text is never encoded differently from the tokenizers package.
  explicit Tokenizer(const std::filesystem::path& path);
  Tokenizer(const Tokenizer&);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer) noexcept;
  ~Tokenizer();

  // Appends to `out`. Invalid UTF-8 is an error, unless tokens are bytes.
  void encode(std::string_view text, std::vector<Token>& out, EncodeOptions = {}) const;
  std::vector<Token> encode(std::string_view text, EncodeOptions = {}) const;
  std::string decode(std::span<const Token>, bool skip_special = true) const;

  size_t size() const;  // tokens are less than this
  bool is_bytes() const;
  std::optional<Token> find(std::string_view token) const;
  std::string name(Token) const;  // as in the file; "" if there is none
  bool is_special(Token) const;

 private:
  std::shared_ptr<const Model> model_;
  std::unique_ptr<Workspace> work_;
};

// Decodes token by token and returns text when it is complete: a character can take several tokens.
class DecodeStream {
 public:
  explicit DecodeStream(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  std::string add(Token);  // the new text, perhaps empty
  std::string rest();      // the remaining text, even if its last character is incomplete

 private:
  const Tokenizer& tokenizer_;
  std::vector<Token> tokens_;  // the tokens of the last text, then those that gave none yet
  size_t context_ = 0;         // how many of the former: context for decoding the latter
};

// A position from 1 to text.size(), about `most` if possible, at which `text` can be cut so that
// the tokens of both parts are those of the whole.
size_t safe_cut(const Tokenizer&, std::string_view text, size_t most);

}  // namespace horner::text

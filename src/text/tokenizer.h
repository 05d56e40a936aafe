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
  bool special = true;     // put the tokens around the text that the tokenizer's template has
  bool continues = false;  // the text goes on from an earlier one: nothing is put before it
};

// A value. Copies share what is read from the file; use each from one thread at a time.
class Tokenizer {
 public:
  Tokenizer();  // a token is a byte
  // `path`: a tokenizer.json, or a folder with one. A feature of it that is not known here is an
  // error which names the field: no text is ever encoded in another way than its makers do.
  explicit Tokenizer(const std::filesystem::path& path);
  Tokenizer(const Tokenizer&);
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer) noexcept;
  ~Tokenizer();

  // Adds to `out`. Text that is no UTF-8 is an error, unless tokens are bytes.
  void encode(std::string_view text, std::vector<Token>& out, EncodeOptions = {}) const;
  std::vector<Token> encode(std::string_view text, EncodeOptions = {}) const;
  std::string decode(std::span<const Token>, bool skip_special = true) const;

  size_t size() const;  // tokens are below this
  bool is_bytes() const;
  std::optional<Token> find(std::string_view token) const;
  std::string name(Token) const;  // as the file spells it; "" where there is none
  bool is_special(Token) const;

 private:
  std::shared_ptr<const Model> model_;
  std::unique_ptr<Workspace> work_;
};

// Tokens one by one, text as soon as it is certain: characters can take several tokens.
class DecodeStream {
 public:
  explicit DecodeStream(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  std::string add(Token);  // the text that came with it, perhaps none
  std::string rest();      // what is left, whole characters or not

 private:
  const Tokenizer& tokenizer_;
  std::vector<Token> tokens_;  // those that gave the last text, then those that gave none yet
  size_t context_ = 0;         // how many of the first kind: what comes is decoded behind them
};

// Where `text`, of which at most about `most` bytes are to be encoded at once, can be cut so that
// both parts give the tokens of the whole: a position from 1 to text.size().
size_t safe_cut(const Tokenizer&, std::string_view text, size_t most);

}  // namespace horner::text

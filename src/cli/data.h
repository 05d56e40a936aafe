// The parts of horner data, and the tokens of a model.
#pragma once

#include <string>
#include <vector>

#include "cli/command.h"
#include "text/tokenizer.h"

namespace horner::cli {

struct PackOptions {
  std::vector<std::string> inputs;  // none: the default corpus
  std::string out = "tokens.bin", tokenizer, key = "text", begin, end;
  size_t shard = 0;  // tokens; 0: as many as the layout can count
  bool force = false, json = false;
};
Outcome pack(const PackOptions&);

struct TokenizerOptions {
  std::vector<std::string> inputs;
  std::string out = "tokenizer.json";
  std::vector<std::string> special;
  size_t vocabulary = 16384;
  bool force = false, json = false;
};
Outcome train_tokenizer(const TokenizerOptions&);

struct TokensOptions {
  std::vector<std::string> files;
  std::string tokenizer;
  size_t shown = 64;
  bool json = false;
};
Outcome describe_tokens(const TokensOptions&);

// The one at `path`, or bytes when that is empty.
text::Tokenizer tokenizer_at(const std::string& path);

// The one in a model's folder, or bytes where there is none and the vocabulary has 256 tokens.
text::Tokenizer model_tokenizer(const std::filesystem::path& folder, int64_t V);

// The tokens of `text`, and those that the tokenizer's own template puts around it.
std::vector<int64_t> model_tokens(const text::Tokenizer&, std::string_view text);

}  // namespace horner::cli

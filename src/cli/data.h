// The parts of horner data.
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
  bool json = false;
};
Outcome pack(const PackOptions&);

struct TokensOptions {
  std::vector<std::string> files;
  std::string tokenizer;
  size_t shown = 64;
  bool json = false;
};
Outcome describe_tokens(const TokensOptions&);

// The one at `path`, or bytes when that is empty.
text::Tokenizer tokenizer_at(const std::string& path);

}  // namespace horner::cli

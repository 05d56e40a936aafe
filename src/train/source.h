// Training data: sequences by index. An index always gives the same sequence, so a position in the
// data is a number, and ranks, resumed runs and all variants see the same data.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace horner::train {

enum class Split { train, validation };

struct Source {
  std::string name;
  int64_t vocabulary;  // tokens are below it; 0: unknown
  // Tokens [T] and targets [T]: the next token, or -1 where there is no target.
  std::function<void(Split, uint64_t index, std::span<int64_t> tokens, std::span<int64_t> targets)>
      fill;
  // Throws, with its position, for a token that is not below V; reads all of a file of tokens.
  std::function<void(int64_t V)> check_tokens = [](int64_t) {};
};

// Sequences at random positions of a token file, or of the default text as bytes if there is none.
// The text is split into up to 64 pieces of at least a million tokens; the last twentieth of each
// is held out for validation. With a file for validation nothing is held out: sequence i of
// validation begins at the fraction i·φ of that file (φ the golden ratio), whatever the seed.
Source text_source(const std::filesystem::path& token_file, uint64_t seed,
                   const std::filesystem::path& validation = {});

}  // namespace horner::train

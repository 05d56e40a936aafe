// What a model is trained on: sequences by number. The same number gives the same sequence, so a
// position in the data is a number, and ranks, resumed runs and all variants see the same.
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
  int64_t vocabulary;  // tokens are below it; 0: not known before they are read
  // Tokens [T], and targets [T]: what comes next, or -1 where nothing is asked.
  std::function<void(Split, uint64_t index, std::span<int64_t> tokens, std::span<int64_t> targets)>
      fill;
};

// Pieces of a text at random places: of a file of tokens, or without one of the default text as
// bytes. It is taken as up to 64 pieces of at least a million tokens; the last twentieth of each
// is for validation.
Source text_source(const std::filesystem::path& token_file, uint64_t seed);

// Random bits that depend on the three numbers alone.
uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index);

}  // namespace horner::train

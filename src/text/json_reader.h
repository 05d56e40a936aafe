// A tokenizer.json in two parts: its settings as JSON, and its two long lists as vectors.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace horner::text {

struct TokenizerJson {
  nlohmann::json settings;  // everything except model.vocab and model.merges, which are null
  std::vector<std::pair<std::string, uint64_t>> vocabulary;
  std::vector<std::pair<std::string, std::string>> merges;  // by rank
};

TokenizerJson parse_tokenizer_json(std::string_view text);

}  // namespace horner::text

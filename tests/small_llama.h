// What the tests of model folders and checkpoints share: a Llama small enough for most flips of a
// byte to hit what is read as text, and whole files.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "nn/config.h"

namespace horner {

inline nn::Json small_llama() {
  return {{"model_type", "llama"},  {"hidden_size", 8},         {"intermediate_size", 12},
          {"num_hidden_layers", 2}, {"num_attention_heads", 2}, {"num_key_value_heads", 1},
          {"vocab_size", 20},       {"rms_norm_eps", 1e-5},     {"max_position_embeddings", 32},
          {"rope_theta", 10000.0},  {"hidden_act", "silu"},     {"tie_word_embeddings", false}};
}

inline void put(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}
inline std::string contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace horner

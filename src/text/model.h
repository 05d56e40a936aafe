// The contents of a tokenizer.json, ready for use.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "text/added.h"
#include "text/bpe.h"
#include "text/decode.h"
#include "text/normalize.h"
#include "text/split.h"

namespace horner::text {

struct Model {
  bool raw_bytes = false;  // tokens are bytes; nothing below is used
  std::vector<Normalizer> normalizers;
  std::vector<Splitter> splitters;
  std::vector<Decoder> decoders;
  Bpe bpe;
  AddedFinder in_raw, in_normalized;  // tokens matched before and after normalization
  std::vector<Token> before, after;   // the template's tokens around a text

  // Indexed by token.
  std::vector<std::string> names;
  std::vector<bool> exists, special;
  TextTable by_name;
};

Model read_model(const std::filesystem::path& tokenizer_json);

}  // namespace horner::text

// What a tokenizer does to text before it looks at it.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/regex.h"

namespace horner::text {

struct Nfc {};  // Unicode's form C
struct Replace {
  Regex pattern;
  std::string content;
  char single = 0;  // the pattern, where that is one ASCII character
};
struct Prepend {
  std::string content;
};
using Normalizer = std::variant<Nfc, Replace, Prepend>;

// `text`, or its changed copy in `buffer`. With `continues` the text goes on from an earlier one,
// and nothing is put before it.
std::string_view normalized(const std::vector<Normalizer>&, std::string_view text, bool continues,
                            std::string& buffer);

}  // namespace horner::text

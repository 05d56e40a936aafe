// Normalizers: the first changes that a tokenizer makes to text.
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
  char single = 0;  // the pattern, if it is one ASCII character
};
struct Prepend {
  std::string content;
};
using Normalizer = std::variant<Nfc, Replace, Prepend>;

// Returns `text`, or its changed copy in `buffer`. With `continues` the text continues an earlier
// one, and nothing is prepended.
std::string_view normalized(const std::vector<Normalizer>&, std::string_view text, bool continues,
                            std::string& buffer);

}  // namespace horner::text

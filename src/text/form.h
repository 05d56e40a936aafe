// Unicode normalization form C, in the Unicode version of the tokenizers package.
#pragma once

#include <string>
#include <string_view>

namespace horner::text {

// Whether composition never changes the character or combines it with the previous one.
bool stable_in_nfc(char32_t);

void append_nfc(std::string_view text, std::string& out);

}  // namespace horner::text

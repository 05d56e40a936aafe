// Unicode's normalization form C, by the version that the tokenizers package goes by.
#pragma once

#include <string>
#include <string_view>

namespace horner::text {

// Whether composing never changes the character, nor joins it with what is before it.
bool stable_in_nfc(char32_t);

void append_nfc(std::string_view text, std::string& out);

}  // namespace horner::text

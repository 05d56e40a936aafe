// Stub where PCRE2 is not installed: every construction throws.
#include "core/check.h"
#include "text/regex.h"

namespace horner::text {

void Regex::Free::operator()(pcre2_real_match_data_8*) const {}
void Regex::make_match() {}
Regex::Regex(const Regex&) {}
Regex::Regex(const std::string& field, const std::string&, bool) {
  fail(field, ": regular expressions require PCRE2: build with it (Debian: libpcre2-dev)");
}

Regex Regex::pattern(const std::string& field, const std::string& pattern) {
  return Regex(field, pattern, false);
}
Regex Regex::own(const std::string& pattern) {
  return Regex::pattern("own pattern", pattern);
}
Regex Regex::literal(const std::string& field, const std::string& text) {
  return Regex::pattern(field, text);
}

std::optional<Range> Regex::find(std::string_view, size_t) const {
  return std::nullopt;
}

}  // namespace horner::text

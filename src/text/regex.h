// Regular expressions of tokenizer files, compiled to machine code by PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;

namespace horner::text {

struct Range {
  size_t begin, end;
};

// Tokenizer files use Oniguruma's syntax. Syntax with the same meaning in PCRE2 is accepted, \s and
// categories are translated (unicode16.h), and anything else is an error that names `field`.
// Not thread-safe; give each thread a copy.
class Regex {
 public:
  static Regex pattern(const std::string& field, const std::string& pattern);
  static Regex own(const std::string& pattern);  // in PCRE2's syntax
  static Regex literal(const std::string& field, const std::string& text);
  Regex(const Regex&);
  Regex(Regex&&) = default;
  Regex& operator=(Regex&&) = default;

  // The first non-empty match at or after `from`. The text must be valid UTF-8.
  std::optional<Range> find(std::string_view text, size_t from) const;

 private:
  Regex(const std::string& field, const std::string& pattern, bool literal);
  struct Free {
    void operator()(pcre2_real_match_data_8*) const;
  };
  void make_match();

  std::shared_ptr<pcre2_real_code_8> code_;
  std::unique_ptr<pcre2_real_match_data_8, Free> match_;
  bool jit_ = false;
};

}  // namespace horner::text

// Regular expressions of tokenizer files: PCRE2, compiled to machine code.
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

// Tokenizer files are written for Oniguruma's syntax. What means the same in both is taken, \s and
// categories are translated (unicode16.h), and anything else is an error that names `field`.
// One thread at a time; a copy is another's.
class Regex {
 public:
  static Regex pattern(const std::string& field, const std::string& pattern);
  static Regex own(const std::string& pattern);  // in PCRE2's syntax
  static Regex literal(const std::string& field, const std::string& text);
  Regex(const Regex&);
  Regex(Regex&&) = default;
  Regex& operator=(Regex&&) = default;

  // The first match at `from` or behind it in valid UTF-8; never an empty one.
  std::optional<Range> find(std::string_view text, size_t from) const;

 private:
  Regex() = default;
  struct Free {
    void operator()(pcre2_real_match_data_8*) const;
  };
  void compile(const std::string& field, const std::string& pattern, bool literal);
  void make_match();

  std::shared_ptr<pcre2_real_code_8> code_;
  std::unique_ptr<pcre2_real_match_data_8, Free> match_;
  bool jit_ = false;
};

}  // namespace horner::text

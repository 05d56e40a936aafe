// Regular expressions by PCRE2.
#include "text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>

#include "core/check.h"
#include "text/unicode16.h"

namespace horner::text {

namespace {

// A stack large enough for long matches; one per thread.
pcre2_match_context* match_context() {
  struct Context {
    pcre2_match_context* match = pcre2_match_context_create(nullptr);
    pcre2_jit_stack* stack = pcre2_jit_stack_create(32 << 10, 16 << 20, nullptr);
    Context() { pcre2_jit_stack_assign(match, nullptr, stack); }
    ~Context() {
      pcre2_jit_stack_free(stack);
      pcre2_match_context_free(match);
    }
  };
  thread_local const Context context;
  return context.match;
}

// Translates \p{…} or \P{…} at `at` to PCRE2 and moves `at` to its end; "" if it is not supported.
std::string category(const std::string& pattern, size_t& at, bool in_class) {
  const size_t end = pattern.find('}', at);
  if (pattern.compare(at + 2, 1, "{") != 0 || end == std::string::npos) return "";
  const std::string name = pattern.substr(at + 3, end - at - 3);
  const bool negative = pattern[at + 1] == 'P';
  const auto* known = std::find_if(std::begin(kCategories), std::end(kCategories),
                                   [&](const Category& c) { return c.name == name; });
  if (known == std::end(kCategories) || (negative && in_class)) return "";
  at = end;
  const std::string both = "\\p{" + name + "}" + std::string(known->added);
  return in_class ? both : (negative ? "[^" : "[") + both + "]";
}

// The pattern in PCRE2's syntax.
std::string translated(const std::string& field, const std::string& pattern) {
  std::string out;
  bool in_class = false;
  const auto refuse = [&](const std::string& what) {
    fail(field, ": the pattern ", pattern, " uses ", what, ", which is not supported");
  };
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      check(i + 1 < pattern.size(), field, ": the pattern ", pattern, " ends in \\");
      const char next = pattern[i + 1];
      if (next == 'p' || next == 'P') {
        const std::string set = category(pattern, i, in_class);
        if (set.empty()) refuse(pattern.substr(i, 8));
        out += set;
        continue;
      }
      ++i;
      if (next == 's' || next == 'S') {
        out += next == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
        continue;
      }
      const bool known = std::string_view("rnt").find(next) != std::string_view::npos;
      if (!known && std::isalnum(static_cast<unsigned char>(next)))
        refuse(std::string("\\") + next);
      out += {c, next};
      continue;
    }
    if (in_class && (c == '[' || pattern.compare(i, 2, "&&") == 0)) refuse("nested sets");
    if (!in_class && (c == '^' || c == '$')) refuse(std::string(1, c));
    if (!in_class && c == '(' && pattern.compare(i, 2, "(?") == 0) {
      const std::string kind = pattern.substr(i + 2, 2);
      if (kind[0] != ':' && kind[0] != '!' && kind[0] != '=' && kind != "i:") refuse("(?" + kind);
    }
    out += c;
    if (!in_class && c == '[') {
      in_class = true;
      if (i + 1 < pattern.size() && pattern[i + 1] == '^') out += pattern[++i];
      if (i + 1 < pattern.size() && pattern[i + 1] == ']') refuse("[]");
    } else if (in_class && c == ']') {
      in_class = false;
    }
  }
  return out;
}

}  // namespace

void Regex::Free::operator()(pcre2_real_match_data_8* match) const {
  pcre2_match_data_free(match);
}

void Regex::make_match() {
  match_.reset(pcre2_match_data_create(1, nullptr));
}

Regex::Regex(const Regex& other) : code_(other.code_), jit_(other.jit_) {
  make_match();
}

Regex::Regex(const std::string& field, const std::string& pattern, bool literal) {
  int error = 0;
  size_t at = 0;
  const uint32_t options = literal ? PCRE2_UTF | PCRE2_LITERAL : PCRE2_UTF | PCRE2_UCP;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   options, &error, &at, nullptr);
  if (!code) {
    unsigned char message[256] = {};
    pcre2_get_error_message(error, message, sizeof message);
    fail(field, ": invalid regular expression ", pattern, ": ", reinterpret_cast<char*>(message),
         " at byte ", at);
  }
  code_.reset(code, pcre2_code_free);
  uint32_t empty = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &empty);
  check(!empty, field, ": the pattern ", pattern, " matches empty text, which is not supported");
  jit_ = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0;
  make_match();
}

Regex Regex::pattern(const std::string& field, const std::string& pattern) {
  return Regex(field, translated(field, pattern), false);
}

Regex Regex::own(const std::string& pattern) {
  return Regex("own pattern", pattern, false);
}

Regex Regex::literal(const std::string& field, const std::string& text) {
  return Regex(field, text, true);
}

std::optional<Range> Regex::find(std::string_view text, size_t from) const {
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const int rc = jit_ ? pcre2_jit_match(code_.get(), subject, text.size(), from, 0, match_.get(),
                                        match_context())
                      : pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK,
                                    match_.get(), match_context());
  if (rc == PCRE2_ERROR_NOMATCH) return std::nullopt;
  check(rc >= 0, "a regular expression of the tokenizer failed (PCRE2 error ", rc, ")");
  const size_t* at = pcre2_get_ovector_pointer(match_.get());
  return Range{at[0], at[1]};
}

}  // namespace horner::text

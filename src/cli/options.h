// What the commands share: options with the word that stands for their value in --help, and JSON.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"

namespace horner::cli {

using Json = nlohmann::ordered_json;

// Whole texts that are one number of type T, of ordinary size for a float.
template <class T>
CLI::Validator number() {
  return {[](const std::string& given) -> std::string {
            T x{};
            const char *end = given.data() + given.size(), *kind = "a number";
            if constexpr (std::is_integral_v<T>)
              kind = std::is_unsigned_v<T> ? "a non-negative integer" : "an integer";
            const auto [rest, error] = std::from_chars(given.data(), end, x);
            if (error == std::errc::result_out_of_range && rest == end)
              return "must be " + std::string(kind) + " that fits into " +
                     std::to_string(8 * sizeof(T)) + " bits, got " + given;
            const bool fits = error == std::errc() && rest == end && std::isfinite(double(x));
            return fits ? "" : "must be " + std::string(kind) + ", got '" + given + "'";
          },
          ""};
}

template <class T>
struct ElementOf {
  using type = T;
};
template <class T>
struct ElementOf<std::vector<T>> {
  using type = T;
};

// The word "FILE" or "DIR" also tells shells what to complete.
template <class T>
CLI::Option* option(CLI::App& app, const char* names, T& value, const std::string& word,
                    const std::string& help) {
  using Element = typename ElementOf<T>::type;
  CLI::Option* const o = app.add_option(names, value, help)->type_name(word);
  if constexpr (std::is_arithmetic_v<Element>) o->check(number<Element>());
  return o;
}

// Numbers in [least, most]; whatever is not a number is left to number().
inline CLI::Validator within(int64_t least, int64_t most = INT64_MAX) {
  return {[=](const std::string& given) {
            double x = double(least);
            const auto read = std::from_chars(given.data(), given.data() + given.size(), x);
            const bool fits = read.ec != std::errc() || (x >= double(least) && x <= double(most));
            const std::string range = most == INT64_MAX
                                          ? "at least " + std::to_string(least)
                                          : std::to_string(least) + " to " + std::to_string(most);
            return fits ? "" : "must be " + range + ", got " + given;
          },
          ""};
}
template <class T>
void positive(CLI::App& app, const char* names, T& value, const char* word, const char* help) {
  option(app, names, value, word, help)->check(within(1));
}
template <class T>
void non_negative(CLI::App& app, const char* names, T& value, const char* word, const char* help) {
  option(app, names, value, word, help)->check(within(0));
}

// The words that an option's value can be. Shells complete them; --help lists them if `shown`.
struct Choices {
  std::vector<std::string> words;
  bool shown = true;
};
CLI::Option* choices(CLI::Option*, Choices);
Choices choices_of(const CLI::Option*);  // without words where any value is possible

Choices variant_choices();    // not shown: there are too many
Choices execution_choices();  // as attn/attend.cpp has them

inline Outcome print_json(const Json& j) {
  std::cout << j.dump(2) << "\n";
  return Outcome::fine;
}

// A number without a fraction where it has none and fits.
inline Json whole(double x) {
  return x < 1e15 ? Json(int64_t(x)) : Json(x);
}

}  // namespace horner::cli

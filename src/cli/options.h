// What the commands share: options with the word that stands for their value in --help, and JSON.
#pragma once

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"

namespace horner::cli {

using Json = nlohmann::ordered_json;

template <class T>
CLI::Option* option(CLI::App& app, const char* names, T& value, const std::string& word,
                    const std::string& help) {
  return app.add_option(names, value, help)->type_name(word);
}

// Numbers from `least` on; whatever is not a number is left to the parser.
inline CLI::Validator at_least(double least) {
  return {[least](const std::string& given) {
            double x = least;
            const bool fits = !CLI::detail::lexical_cast(given, x) || x >= least;
            return fits ? "" : "must be at least " + Json(int64_t(least)).dump() + ", got " + given;
          },
          ""};
}
template <class T>
void positive(CLI::App& app, const char* names, T& value, const char* word, const char* help) {
  option(app, names, value, word, help)->check(at_least(1));
}
template <class T>
void non_negative(CLI::App& app, const char* names, T& value, const char* word, const char* help) {
  option(app, names, value, word, help)->check(at_least(0));
}

inline Outcome print_json(const Json& j) {
  std::cout << j.dump(2) << "\n";
  return Outcome::fine;
}

// A number without a fraction where it has none and fits.
inline Json whole(double x) {
  return x < 1e15 ? Json(int64_t(x)) : Json(x);
}

}  // namespace horner::cli

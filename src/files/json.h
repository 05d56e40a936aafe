// JSON files. Json keeps the order of keys; dump() writes NaN and infinity as null.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace horner::files {

using Json = nlohmann::ordered_json;

Json read_json(const std::filesystem::path&);  // errors name the file

// What is wrong with a JSON text, without the parser's own words: "line 2, column 1: unexpected
// end of input; expected …".
std::string problem_of(const Json::exception&);

// Indented, with a newline at the end; atomic, as NewFile is.
void write_json(const std::filesystem::path&, const Json&, int indent = 2);

}  // namespace horner::files

// JSON files. Json keeps the order of keys; dump() writes NaN and infinity as null.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace horner::files {

using Json = nlohmann::ordered_json;

Json read_json(const std::filesystem::path&);  // errors name the file

// Indented, with a newline at the end; atomic, as NewFile is.
void write_json(const std::filesystem::path&, const Json&, int indent = 2);

}  // namespace horner::files

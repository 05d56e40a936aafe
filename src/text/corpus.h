// Text to train on: files, folders and a default.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace horner::text {

// The Python sources of the installed torch package, sorted by path: about 40 MB of real text on
// every machine where this runs. Throws if torch is not loaded.
std::vector<std::filesystem::path> default_corpus();

// The files, and every regular file in the folders, sorted.
std::vector<std::filesystem::path> files_of(const std::vector<std::filesystem::path>&);

// The text of a JSONL line: the string under `key`. `where` precedes error messages.
std::string text_of_line(std::string_view line, const std::string& key, const std::string& where);

}  // namespace horner::text

// Text to train on: files and folders, and the one that is always there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace horner::text {

// The Python sources inside the installed torch package, sorted by path: a real text of some 40 MB
// that every machine has on which this runs. Throws where torch is not loaded.
std::vector<std::filesystem::path> default_corpus();

// Every regular file in the folders, sorted; files as they are.
std::vector<std::filesystem::path> files_of(const std::vector<std::filesystem::path>&);

// The text of a line of JSONL: the string under `key`. `where` is for the error.
std::string text_of_line(std::string_view line, const std::string& key, const std::string& where);

}  // namespace horner::text

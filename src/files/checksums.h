// checksums.txt: CRC-32C and size of every file of a folder, one per line; the last line is that of
// the lines before it.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace horner::files {

inline constexpr const char* kChecksums = "checksums.txt";

void write_checksums(const std::filesystem::path& folder);  // of the files that are in it now

// What is wrong with the listed files, such as "model.safetensors has changed"; "" if they are what
// was written. Files that are not listed do not matter. Reads only those that `wanted` accepts.
std::string damage_of(
    const std::filesystem::path& folder,
    const std::function<bool(const std::string& name)>& wanted = [](const auto&) { return true; });

}  // namespace horner::files

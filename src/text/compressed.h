// Compressed files, by their suffix: .xz, .gz and .zst, each where its library was found by CMake.
#pragma once

#include <filesystem>
#include <functional>
#include <string_view>

namespace horner::text {

bool is_compressed(const std::filesystem::path&);

// Passes the content to `take`, piece by piece. Throws if the file is damaged or incomplete, and
// for a suffix whose library this build does not have.
void decompress(const std::filesystem::path&, const std::function<void(std::string_view)>& take);

}  // namespace horner::text

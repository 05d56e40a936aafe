// Names that people type: the nearest of a list, for "did you mean".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace horner {

// The few names that are nearest to `wanted`, nearest first.
std::vector<std::string> nearest(std::string_view wanted, const std::vector<std::string>& names,
                                 size_t most = 3);

// "'a', 'b' or 'c'"
std::string quoted(const std::vector<std::string>& names);

// Whether `name` matches `pattern`, in which * stands for any characters.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace horner

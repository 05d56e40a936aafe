// Names typed by users: suggestions for "did you mean", quoted lists, and wildcards.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace horner {

// At most `most` names closest to `wanted` in edit distance, closest first.
std::vector<std::string> nearest(std::string_view wanted, const std::vector<std::string>& names,
                                 size_t most = 3);

// "'a', 'b' or 'c'"
std::string quoted(const std::vector<std::string>& names);

// Whether `name` matches `pattern`, where * matches any characters.
bool matches(std::string_view pattern, std::string_view name);

}  // namespace horner

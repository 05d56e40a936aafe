// What a user reads when something below the commands throws.
#pragma once

#include <exception>
#include <string>

namespace horner::cli {

// One line: our own messages as they are; those of libraries in words of ours.
std::string message_of(const std::exception&);

}  // namespace horner::cli

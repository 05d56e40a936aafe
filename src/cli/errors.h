// What a user reads when something below the commands throws.
#pragma once

#include <exception>
#include <string>

namespace horner::cli {

// One line: our own messages as they are; those of libraries in words of ours.
std::string message_of(const std::exception&);

// Of a GPU, or of the host where an allocation fails.
bool is_out_of_memory(const std::exception&);

}  // namespace horner::cli

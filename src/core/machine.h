// What Linux says about this machine and process.
#pragma once

#include <string>

namespace horner {

// The value of the first line "key: value" in a file of such lines; "" if there is none.
std::string proc_value(const char* file, const std::string& key);

std::string processor_name();

}  // namespace horner

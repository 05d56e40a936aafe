// The page of a report, as web/ builds it: HTML with a place for the data.
#pragma once

#include <string_view>

namespace horner::report {

std::string_view page();  // empty where the program was built without npm

}  // namespace horner::report

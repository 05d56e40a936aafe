// The HTML page of reports, built from web/, with a placeholder for the data.
#pragma once

#include <string_view>

namespace horner::report {

std::string_view page();  // empty if built without npm

}  // namespace horner::report

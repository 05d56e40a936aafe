// Numbers as people read them.
#pragma once

#include <cstdio>
#include <string>

namespace horner {

template <class... Ts>
std::string formatted(const char* format, Ts... x) {  // by printf's rules
  char text[256];
  std::snprintf(text, sizeof text, format, x...);
  return text;
}

std::string count_text(double n);           // "47,905", "3.1e+24"
std::string size_text(double bytes);        // "17 KB", "12.5 MB"
std::string duration_text(double seconds);  // "7 s", "2 min 5 s", "3 h 20 min"

}  // namespace horner

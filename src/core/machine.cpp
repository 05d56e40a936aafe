#include "core/machine.h"

#include <algorithm>
#include <fstream>

namespace horner {

std::string proc_value(const char* file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(':');
    if (line.starts_with(key) && colon != std::string::npos)
      return line.substr(std::min(line.size(), line.find_first_not_of(" \t", colon + 1)));
  }
  return "";
}

std::string processor_name() {
  return proc_value("/proc/cpuinfo", "model name");
}

}  // namespace horner

#include "files/checksums.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "core/crc32c.h"
#include "files/files.h"

namespace horner::files {

namespace fs = std::filesystem;

static std::string line_of(const std::string& name, std::string_view bytes) {
  char numbers[48];
  std::snprintf(numbers, sizeof numbers, "%08x %zu ", crc32c(bytes), bytes.size());
  return numbers + name + "\n";
}

void write_checksums(const fs::path& folder) {
  std::vector<std::string> names;
  for (const fs::directory_entry& e : fs::directory_iterator(folder))
    if (e.is_regular_file()) names.push_back(e.path().filename().string());
  std::sort(names.begin(), names.end());
  std::string text;
  for (const std::string& name : names) text += line_of(name, MappedFile(folder / name).text());
  NewFile out(folder / kChecksums);
  out.write(text + line_of(kChecksums, text));
  out.commit();
}

std::string damage_of(const fs::path& folder,
                      const std::function<bool(const std::string&)>& wanted) {
  if (!fs::is_regular_file(folder / kChecksums)) return "checksums.txt is missing";
  const MappedFile file(folder / kChecksums);
  const std::string_view all = file.text();
  const size_t end = all.size() < 2 ? 0 : all.rfind('\n', all.size() - 2) + 1;  // of the list
  const std::string_view list = all.substr(0, end);
  if (all.substr(end) != line_of(kChecksums, list)) return "checksums.txt has changed";
  for (size_t at = 0; at < list.size();) {
    const size_t next = list.find('\n', at) + 1;
    const std::string line(list.substr(at, next - at));
    at = next;
    const size_t space = line.find(' ', line.find(' ') + 1);
    const std::string name = line.substr(space + 1, line.size() - space - 2);
    if (!wanted(name)) continue;
    if (!fs::is_regular_file(folder / name)) return name + " is missing";
    if (line_of(name, MappedFile(folder / name).text()) != line) return name + " has changed";
  }
  return "";
}

}  // namespace horner::files

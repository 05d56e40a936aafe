// Text to train on.
#include "text/corpus.h"

#include <link.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/check.h"

namespace horner::text {

namespace {

using Path = std::filesystem::path;

// The folder of the torch package, two above the loaded libc10.so.
Path torch_folder() {
  Path library;
  const auto look = [](dl_phdr_info* info, size_t, void* out) {
    if (Path(info->dlpi_name).filename() != "libc10.so") return 0;
    *static_cast<Path*>(out) = info->dlpi_name;
    return 1;
  };
  ::dl_iterate_phdr(look, &library);
  check(!library.empty(),
        "the default text is torch's Python sources, but torch is not loaded; name a text file");
  return std::filesystem::weakly_canonical(library).parent_path().parent_path();
}

template <class F>
void add_files(const Path& folder, std::vector<Path>& out, F wanted) {
  const size_t before = out.size();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && wanted(entry.path())) out.push_back(entry.path());
  std::sort(out.begin() + ptrdiff_t(before), out.end());
}

}  // namespace

std::vector<Path> default_corpus() {
  std::vector<Path> out;
  add_files(torch_folder(), out, [](const Path& p) { return p.extension() == ".py"; });
  check(!out.empty(), "no Python sources in '", torch_folder().string(), "'");
  return out;
}

std::vector<Path> files_of(const std::vector<Path>& paths) {
  std::vector<Path> out;
  for (const Path& path : paths) {
    check(std::filesystem::exists(path), "no file or folder '", path.string(), "'");
    if (std::filesystem::is_directory(path))
      add_files(path, out, [](const Path&) { return true; });
    else
      out.push_back(path);
  }
  return out;
}

std::string text_of_line(std::string_view line, const std::string& key, const std::string& where) {
  const auto json = nlohmann::json::parse(line, nullptr, false);
  check(json.is_object(), where, ": expected a JSON object");
  const auto at = json.find(key);
  if (at == json.end() || !at->is_string()) {
    std::string keys;
    for (const auto& item : json.items()) keys += (keys.empty() ? "" : ", ") + item.key();
    fail(where, ": missing string '", key, "'; the keys are: ", keys.empty() ? "none" : keys);
  }
  return at->get<std::string>();
}

}  // namespace horner::text

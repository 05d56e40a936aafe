#include "files/json.h"

#include "core/check.h"
#include "files/files.h"

namespace horner::files {

std::string problem_of(const Json::exception& e) {
  std::string out = e.what();
  const auto drop = [&](const std::string& first, const std::string& last) {
    const size_t at = out.find(first), end = out.find(last, at);
    if (at != std::string::npos && end != std::string::npos) out.erase(at, end + last.size() - at);
  };
  drop("[json.exception.", "] ");
  drop("parse error at", " ");
  drop("syntax error while parsing", " - ");
  return out;
}

Json read_json(const std::filesystem::path& path) {
  const MappedFile file(path);
  try {
    return Json::parse(file.text());
  } catch (const Json::exception& e) {
    fail("'", path.string(), "' is not valid JSON: ", problem_of(e));
  }
}

void write_json(const std::filesystem::path& path, const Json& json, int indent) {
  NewFile out(path);
  out.write(json.dump(indent) + "\n");
  out.commit();
}

}  // namespace horner::files

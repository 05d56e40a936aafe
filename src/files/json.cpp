#include "files/json.h"

#include "core/check.h"
#include "files/files.h"

namespace horner::files {

Json read_json(const std::filesystem::path& path) {
  const MappedFile file(path);
  try {
    return Json::parse(file.text());
  } catch (const Json::exception& e) {
    fail("'", path.string(), "' is not valid JSON: ", e.what());
  }
}

void write_json(const std::filesystem::path& path, const Json& json, int indent) {
  NewFile out(path);
  out.write(json.dump(indent) + "\n");
  out.commit();
}

}  // namespace horner::files

#include "files/output.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/check.h"
#include "files/files.h"

namespace horner::files {

namespace fs = std::filesystem;

static fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

// Whether `path` is or would be below `folder`, through whatever links.
static bool is_inside(const fs::path& path, const fs::path& folder) {
  std::error_code error;
  for (fs::path p = fs::weakly_canonical(folder_of(path), error);; p = p.parent_path()) {
    if (fs::equivalent(p, folder, error)) return true;
    if (p == p.parent_path()) return false;
  }
}

void check_output(const Output& out, bool force) {
  const std::string name = "'" + out.path.string() + "'";
  for (const fs::path& input : out.inputs) {
    std::error_code error;
    check(!fs::equivalent(out.path, input, error), name, " is an input of this command",
          "; choose another output");
    check(!fs::is_directory(input, error) || !is_inside(out.path, input), name,
          " is inside the input '", input.string(),
          "', where this command would read it as input; choose a place outside");
  }
  if (!fs::exists(out.path)) return;
  check(fs::is_regular_file(out.path), "cannot write ", name, ": it is not a regular file");
  if (force) return;
  const MappedFile file(out.path);
  check(file.text().empty() || out.ours(file.text()), name,
        " exists and is not a file that this command writes; ", out.otherwise);
}

// The temporary name of NewFile: .part-PROCESS-NUMBER.
static bool is_leftover(std::string_view name, std::string_view of) {
  constexpr std::string_view kPart = ".part-", kDigits = "0123456789";
  if (!name.starts_with(of) || !name.substr(of.size()).starts_with(kPart)) return false;
  const std::string_view rest = name.substr(of.size() + kPart.size());
  const size_t dash = rest.find('-');
  return dash != rest.npos && dash > 0 && dash + 1 < rest.size() &&
         rest.substr(0, dash).find_first_not_of(kDigits) == rest.npos &&
         rest.substr(dash + 1).find_first_not_of(kDigits) == rest.npos;
}

void remove_leftovers(const fs::path& output) {
  std::error_code error;
  for (fs::directory_iterator at(folder_of(output), error), end; !error && at != end;
       at.increment(error)) {
    if (!is_leftover(at->path().filename().string(), output.filename().string())) continue;
    const int file = ::open(at->path().c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) continue;
    if (::flock(file, LOCK_EX | LOCK_NB) == 0) ::unlink(at->path().c_str());
    ::close(file);
  }
}

}  // namespace horner::files

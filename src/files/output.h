// The rule for every file that a command writes: it is not one of the command's inputs, and a file
// that is there already is replaced only if it is of the kind that the command writes, or on
// demand.
#pragma once

#include <filesystem>
#include <string_view>
#include <vector>

namespace horner::files {

struct Output {
  std::filesystem::path path;
  bool (*ours)(std::string_view text);  // whether a file with this content is of the command's kind
  std::vector<std::filesystem::path> inputs =
      {};  // files; and folders, all of whose files are read
  const char* otherwise = "add --force to replace it";  // what to do about another file
};

// Throws if it breaks the rule. With `force` it may replace any file but an input. Files are
// compared by device and number: links do not hide them.
void check_output(const Output&, bool force = false);

// Removes temporary files of this output that killed processes have left: nobody locks them.
void remove_leftovers(const std::filesystem::path& output);

}  // namespace horner::files

// One process per folder: a lock that the kernel releases when its owner dies, however it dies.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace horner::files {

// Holds FOLDER/.lock, which names host and process; a lock file that a dead process left is taken
// over. Creates the folder if necessary. Throws if another process holds the lock. At the end it
// removes the file, and the folders that it created if they are still empty.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  const std::string& warning() const { return warning_; }  // why the lock may not hold, or ""

 private:
  bool take();  // false: the owner has just removed the file or its folder

  std::filesystem::path folder_, path_;
  std::vector<std::filesystem::path> made_;  // outermost first
  std::string warning_;
  int file_ = -1;
};

// The process that holds the folder's lock, such as "process 12 on host since …"; "" if none does.
std::string owner_of(const std::filesystem::path& folder);

// Whether a mount, by its line of /proc/self/mountinfo, keeps locks on this machine alone, as NFS
// does with 'nolock' or 'local_lock'.
bool has_local_locks(std::string_view mountinfo, unsigned major, unsigned minor);

}  // namespace horner::files

// Files, by POSIX calls.
#include "files/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "core/check.h"
#include "files/output.h"

namespace horner::files {

namespace {

// An open file, closed at the end of the scope.
struct Descriptor {
  int file;
  ~Descriptor() {
    if (file >= 0) ::close(file);
  }
};

[[noreturn]] void fail_to(const char* what, const std::filesystem::path& path, int error) {
  fail("cannot ", what, " '", path.string(), "': ", std::strerror(error));
}

// Whether `path` is this open file.
bool is_at(int file, const std::filesystem::path& path) {
  struct stat here, there;
  return ::fstat(file, &here) == 0 && ::stat(path.c_str(), &there) == 0 &&
         here.st_ino == there.st_ino && here.st_dev == there.st_dev;
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const Descriptor d{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (d.file < 0) fail_to("open", path, errno);
  struct stat info;
  if (::fstat(d.file, &info) != 0) fail_to("read", path, errno);
  check(S_ISREG(info.st_mode), "cannot read '", path.string(), "': not a regular file");
  size_ = size_t(info.st_size);
  if (size_ == 0) return;  // mmap rejects empty files
  // NORESERVE: pages that are never written need no swap.
  data_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, d.file, 0);
  if (data_ == MAP_FAILED) fail_to("map", path, errno);
}

MappedFile::~MappedFile() {
  if (size_ > 0) ::munmap(data_, size_);
}

void MappedFile::forget(size_t size) const {
  const size_t page = size_t(::sysconf(_SC_PAGESIZE));
  const size_t whole = size < size_ ? size / page * page : size_;
  if (whole > 0) ::madvise(data_, whole, MADV_DONTNEED);
}

NewFile::NewFile(const std::filesystem::path& path) : path_(path) {
  static std::atomic<int> count = 0;
  remove_leftovers(path);
  // A new file: on another machine, or in another container, a process may have the same number.
  const auto open_new = [&] {
    temporary_ = path;
    temporary_ += ".part-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
    return ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  };
  // Locked, so that others see that its process lives. They may have removed it before.
  do {
    if (file_ >= 0) ::close(file_);
    while ((file_ = open_new()) < 0)
      if (errno != EEXIST) fail_to("write", path, errno);
  } while (::flock(file_, LOCK_EX) == 0 && !is_at(file_, temporary_));
}

NewFile::~NewFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void NewFile::put(size_t offset, Bytes bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(file_, bytes.data(), bytes.size(), off_t(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_to("write", path_, n < 0 ? errno : ENOSPC);
    bytes = bytes.subspan(size_t(n));
    offset += size_t(n);
  }
}

void NewFile::write(Bytes bytes) {
  put(size_, bytes);
  size_ += bytes.size();
}

void NewFile::write_at(size_t offset, Bytes bytes) {
  check(offset <= size_ && bytes.size() <= size_ - offset, "write_at must stay within the ", size_,
        " bytes written");
  put(offset, bytes);
}

void NewFile::commit() {
  if (::fsync(file_) != 0) fail_to("write", path_, errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_to("write", path_, errno);
  ::close(file_);
  file_ = -1;
  sync_folder(path_.has_parent_path() ? path_.parent_path() : ".");
}

void sync_folder(const std::filesystem::path& folder) {
  const Descriptor d{::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (d.file >= 0) ::fsync(d.file);
}

}  // namespace horner::files

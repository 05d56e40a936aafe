// Files: one mapped into memory, and one that appears under its name only when it is whole.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace horner::files {

using Bytes = std::span<const std::byte>;

// Mapped copy-on-write: who writes to it changes his memory, never the file.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path&);  // throws what the system says
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  Bytes bytes() const { return {static_cast<const std::byte*>(data_), size_}; }
  std::string_view text() const { return {static_cast<const char*>(data_), size_}; }
  const std::filesystem::path& path() const { return path_; }
  void forget(
      size_t size) const;  // the first bytes need no memory any more; they can be read again

 private:
  std::filesystem::path path_;
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Written beside `path` under a temporary name. commit() brings it to the disk and renames it;
// without one, or after an error, nothing is left of it and what was at `path` stays.
class NewFile {
 public:
  explicit NewFile(const std::filesystem::path&);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(Bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void write_at(size_t offset, Bytes);  // over what was written already
  void commit();

 private:
  void put(size_t offset, Bytes);

  std::filesystem::path path_, temporary_;
  int file_ = -1;
  size_t size_ = 0;
};

}  // namespace horner::files

// Files: mapped into memory, and written atomically.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace horner::files {

using Bytes = std::span<const std::byte>;

// Mapped copy-on-write: writes never reach the file.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path&);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  Bytes bytes() const { return {static_cast<const std::byte*>(data_), size_}; }
  std::string_view text() const { return {static_cast<const char*>(data_), size_}; }
  const std::filesystem::path& path() const { return path_; }
  void forget(size_t size) const;  // releases the memory of the first bytes; they stay readable

 private:
  std::filesystem::path path_;
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Written next to `path` under a temporary name. commit() syncs it to disk and renames it. Without
// a commit(), or after an error, it is deleted and the old file at `path` stays.
class NewFile {
 public:
  explicit NewFile(const std::filesystem::path&);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(Bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void write_at(size_t offset, Bytes);  // overwrites bytes that are already written
  void commit();

 private:
  void put(size_t offset, Bytes);

  std::filesystem::path path_, temporary_;
  int file_ = -1;
  size_t size_ = 0;
};

void sync_folder(const std::filesystem::path&);  // makes new names in it durable

}  // namespace horner::files

// Files for TensorBoard: a sequence of records, each a protobuf Event of TensorFlow's, written by
// hand.
//   record = size u64, check(size) u32, event, check(event) u32
//   check(x) = rotate(crc32c(x), right 15) + 0xa282ead8
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <span>
#include <string>

namespace horner::train {

struct Scalar {
  std::string tag;
  float value;
};

// Every start of a run has a file of its own in the run's folder, named to sort behind those of
// earlier starts. It says from which step it goes on: TensorBoard drops what earlier files have
// from there.
class EventFile {
 public:
  EventFile(const std::filesystem::path& folder, int64_t first_step);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  // Written at once, in one piece; after an error, such as a full disk, the file is as before.
  void add(int64_t step, std::span<const Scalar>);
  void add(int64_t step, std::span<const Scalar>, double wall_time);  // seconds since 1970
  void add(int64_t step, std::initializer_list<Scalar> scalars) {
    add(step, std::span(scalars.begin(), scalars.size()));
  }

  const std::filesystem::path& path() const { return path_; }

 private:
  void append(const std::string& event);

  std::filesystem::path path_;
  int file_ = -1;
  int64_t size_ = 0;  // of the whole records
};

}  // namespace horner::train

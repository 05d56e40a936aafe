// TensorBoard event files: a sequence of records, each a TensorFlow Event, encoded by hand.
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

// Every start of a run writes its own file in the run's folder, with a name that sorts after
// earlier ones. The file states its first step: TensorBoard drops later steps of earlier files.
class EventFile {
 public:
  EventFile(const std::filesystem::path& folder, int64_t first_step);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  // Writes immediately, as one record; after an error, such as a full disk, the file is unchanged.
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
  int64_t size_ = 0;  // bytes of complete records
};

}  // namespace horner::train

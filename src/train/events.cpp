#include "train/events.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>

#include "core/check.h"
#include "core/crc32c.h"

namespace horner::train {

namespace {

uint32_t masked_crc(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8u;
}

template <class T>
std::string little_endian(T x) {
  std::string out;
  for (size_t i = 0; i < sizeof(T); ++i) out += char(x >> 8 * i & 255);
  return out;
}

std::string varint(uint64_t x) {
  std::string out;
  for (; x > 127; x >>= 7) out += char((x & 127) | 128);
  return out += char(x);
}

// Fields of a protobuf message: the key holds the field number and the wire type.
std::string key(int field, int kind) {
  return varint(uint64_t(field) << 3 | kind);
}
std::string number(int field, int64_t x) {
  return key(field, 0) + varint(uint64_t(x));
}
std::string real(int field, double x) {
  return key(field, 1) + little_endian(std::bit_cast<uint64_t>(x));
}
std::string real(int field, float x) {
  return key(field, 5) + little_endian(std::bit_cast<uint32_t>(x));
}
std::string bytes(int field, std::string_view x) {
  return key(field, 2) + varint(x.size()).append(x);
}

// Event: 1 wall_time, 2 step, 3 file_version, 5 summary, 7 session_log
std::string event(double wall_time, int64_t step, const std::string& what) {
  return real(1, wall_time) + number(2, step) + what;
}

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

constexpr std::string_view kFilePrefix = "events.out.tfevents.";

// Seconds since 1970, later than those in the names of existing files: TensorBoard reads files in
// the order of their names.
int64_t second_of_a_new_file(const std::filesystem::path& folder) {
  int64_t second = int64_t(now());
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    int64_t other = 0;
    if (!name.starts_with(kFilePrefix)) continue;
    std::from_chars(name.data() + kFilePrefix.size(), name.data() + name.size(), other);
    second = std::max(second, other + 1);
  }
  return second;
}

}  // namespace

EventFile::EventFile(const std::filesystem::path& folder, int64_t first_step) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  check(!error, folder, ": ", error.message());
  char host[256] = "";
  if (::gethostname(host, sizeof host - 1) != 0 || !*host) std::strcpy(host, "localhost");
  path_ = folder / (std::string(kFilePrefix) + std::to_string(second_of_a_new_file(folder)) + "." +
                    host + "." + std::to_string(::getpid()));
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  check(file_ >= 0, path_, ": ", std::strerror(errno));
  const double begin = now();
  constexpr int kStart = 1;  // SessionLog: 1 status
  append(event(begin, 0, bytes(3, "brain.Event:2")));
  append(event(begin, first_step, bytes(7, number(1, kStart))));
}

EventFile::~EventFile() {
  if (file_ >= 0) ::close(file_);
}

void EventFile::add(int64_t step, std::span<const Scalar> scalars) {
  add(step, scalars, now());
}

void EventFile::add(int64_t step, std::span<const Scalar> scalars, double wall_time) {
  std::string summary;  // Summary: 1 values; value: 1 tag, 2 simple_value
  for (const Scalar& s : scalars) summary += bytes(1, bytes(1, s.tag) + real(2, s.value));
  append(event(wall_time, step, bytes(5, summary)));
}

void EventFile::append(const std::string& event) {
  const std::string size = little_endian(uint64_t(event.size()));
  const std::string record =
      size + little_endian(masked_crc(size)) + event + little_endian(masked_crc(event));
  for (size_t done = 0; done < record.size();) {
    const ssize_t n = ::pwrite(file_, record.data() + done, record.size() - done, size_ + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const std::string why = n < 0 ? std::strerror(errno) : "write returned 0 bytes";
      // A partial record would hide all that follow.
      const bool whole = ::ftruncate(file_, size_) == 0;
      fail(path_, ": ", why, whole ? "" : "; the file ends in a partial record");
    }
    done += n;
  }
  size_ += int64_t(record.size());
}

}  // namespace horner::train

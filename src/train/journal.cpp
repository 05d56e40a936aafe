#include "train/journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "files/files.h"

namespace horner::train {

void rewind_journal(const std::filesystem::path& path, int64_t last) {
  if (!std::filesystem::exists(path)) return;
  std::string kept;
  {
    const files::MappedFile file(path);
    const std::string_view text = file.text();
    for (size_t at = 0; at < text.size();) {
      const size_t end = text.find('\n', at);
      if (end == std::string_view::npos) break;
      const std::string_view line = text.substr(at, end + 1 - at);
      const Json j = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (j.is_object() && j.value("step", last + 1) <= last) kept += line;
      at = end + 1;
    }
  }
  files::NewFile out(path);
  out.write(kept);
  out.commit();
}

bool has_lines(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return false;
  const files::MappedFile file(path);
  return file.text().find('\n') != std::string_view::npos;
}

void write_journal(const std::filesystem::path& path, const Json& line) {
  const std::string text = line.dump() + "\n";
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  const ssize_t n = file < 0 ? -1 : ::write(file, text.data(), text.size());
  const int error = n < 0 ? errno : ENOSPC;
  if (file >= 0) ::close(file);
  check(n == ssize_t(text.size()), "cannot write '", path.string(), "': ", std::strerror(error));
}

void add(Window& w, double x) {
  if (w.values.size() == Window::kSize) w.values.erase(w.values.begin());
  w.values.push_back(x);
}

struct Moments {
  double mean, deviation;
};
static std::optional<Moments> moments(const Window& w) {
  if (w.values.size() < Window::kLeast) return {};
  double sum = 0, squares = 0;
  for (const double x : w.values) sum += x;
  const double mean = sum / double(w.values.size());
  for (const double x : w.values) squares += (x - mean) * (x - mean);
  return Moments{mean, std::sqrt(squares / double(w.values.size()))};
}

std::optional<double> z_score(const Window& w, double x) {
  const auto m = moments(w);
  if (!m || m->deviation == 0 || !std::isfinite(x)) return {};
  return (x - m->mean) / m->deviation;
}

double at_z_score(const Window& w, double z) {
  const auto m = moments(w);
  return m ? m->mean + z * m->deviation : std::numeric_limits<double>::infinity();
}

}  // namespace horner::train

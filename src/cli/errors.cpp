#include "cli/errors.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <filesystem>

#include "cli/table.h"
#include "core/check.h"
#include "files/json.h"
#include "instruments/bench.h"

namespace horner::cli {

static constexpr const char* kSmaller = "; choose a smaller batch, length or model, or free memory";

// The number after `words` in `text`; 0 if there is none.
static double number_after(const std::string& text, const std::string& words) {
  const size_t at = text.find(words);
  uint64_t n = 0;
  if (at != std::string::npos)
    std::from_chars(text.data() + at + words.size(), text.data() + text.size(), n);
  return double(n);
}

// A fault of this program: the detail is for whoever repairs it.
static std::string fault(const std::string& detail) {
  return "unexpected error, which is a fault of horner; please report it with the command that "
         "you ran and this detail: " +
         detail;
}

static bool says(const c10::Error& e, const char* words) {
  return std::string_view(e.what_without_backtrace()).find(words) != std::string_view::npos;
}
static bool is_of_gpu_memory(const c10::Error& e) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&e) || says(e, "CUDA out of memory");
}
static bool is_of_main_memory(const c10::Error& e) {
  return says(e, "can't allocate memory");
}

bool is_out_of_memory(const std::exception& e) {
  const auto* torch = dynamic_cast<const c10::Error*>(&e);
  return dynamic_cast<const std::bad_alloc*>(&e) ||
         (torch && (is_of_gpu_memory(*torch) || is_of_main_memory(*torch)));
}

static std::string message_of_torch(const c10::Error& e) {
  const std::string text = e.what_without_backtrace(), first = text.substr(0, text.find('\n'));
  if (is_of_gpu_memory(e)) return std::string("the GPU is out of memory") + kSmaller;
  if (is_of_main_memory(e))
    return "out of memory: " + size_text(number_after(text, "you tried to allocate ")) +
           " were requested at once, " + size_text(instruments::free_bytes()) + " are free" +
           kSmaller;
  if (says(e, "overflow"))
    return "a tensor of the requested sizes would have more than 9.2e+18 elements or bytes" +
           std::string(kSmaller);
  if (says(e, "CUDA error") || says(e, "CUDA driver"))
    return "the GPU reported an error; 'horner info' shows whether torch can use it (" + first +
           ")";
  return fault("torch: " + first);
}

std::string message_of(const std::exception& e) {
  using nlohmann::json;
  if (dynamic_cast<const Error*>(&e)) return e.what();
  if (const auto* torch = dynamic_cast<const c10::Error*>(&e)) return message_of_torch(*torch);
  if (const auto* file = dynamic_cast<const std::filesystem::filesystem_error*>(&e))
    return "cannot use '" + file->path1().string() + "': " + file->code().message();
  if (const auto* data = dynamic_cast<const json::exception*>(&e))
    return "a JSON file has an unexpected value: " + files::problem_of(*data);
  if (dynamic_cast<const std::bad_alloc*>(&e)) return std::string("out of memory") + kSmaller;
  return fault(e.what());
}

}  // namespace horner::cli

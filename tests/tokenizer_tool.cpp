// For tokenizer_test.py: tokens of texts, and texts of tokens, in one process.
//   tokenizer_tool encode TOKENIZER FILE [raw]    FILE: u32 size, bytes, u32 size, bytes, …
//   tokenizer_tool decode TOKENIZER FILE [keep]   FILE: u32 count, u32 tokens, …
//   tokenizer_tool check FILE…                    "fine" or the error of each
//   tokenizer_tool time TOKENIZER FILE            seconds for the whole text at once, and tokens
// Answers in the same form on stdout.
#include <algorithm>
#include <cstring>
#include <iostream>

#include "core/check.h"
#include "core/stopwatch.h"
#include "files/files.h"
#include "text/tokenizer.h"

namespace {

using namespace horner;

void put(const void* data, size_t count, size_t element) {
  const uint32_t n = uint32_t(count);
  std::cout.write(reinterpret_cast<const char*>(&n), 4);
  std::cout.write(static_cast<const char*>(data), std::streamsize(count * element));
}

// The next item of the file, of elements of the given size.
std::string_view take(std::string_view& rest, size_t element) {
  uint32_t n = 0;
  std::memcpy(&n, rest.data(), 4);
  const std::string_view out = rest.substr(4, n * element);
  rest.remove_prefix(4 + n * element);
  return out;
}

void check_files(int argc, char** argv) {
  for (int i = 2; i < argc; ++i) try {
      const text::Tokenizer t{argv[i]};
      t.decode(t.encode("A word, and 12 more.\n\n  Grüße aus  Łódź ▁ 🙂"));
      std::cout << "fine\n";
    } catch (const Error& e) {
      std::cout << e.what() << "\n";
    }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string_view what = argv[1];
  if (what == "check") return check_files(argc, argv), 0;
  Stopwatch loading;
  const text::Tokenizer t =
      std::string_view(argv[2]) == "bytes" ? text::Tokenizer() : text::Tokenizer(argv[2]);
  std::cerr << "loaded in " << loading.ms() << " ms\n";
  const files::MappedFile file(argv[3]);
  std::string_view rest = file.text();
  if (what == "time") {
    std::vector<text::Token> out;
    Stopwatch watch;
    t.encode(rest, out, {.special = false});
    std::cout << watch.ms() / 1e3 << " " << out.size() << "\n";
    return 0;
  }
  while (!rest.empty()) {
    if (what == "encode") {
      const auto tokens = t.encode(take(rest, 1), {.special = argc < 5});
      put(tokens.data(), tokens.size(), sizeof(text::Token));
    } else {
      const std::string_view bytes = take(rest, sizeof(text::Token));
      std::vector<text::Token> tokens(bytes.size() / sizeof(text::Token));
      std::memcpy(tokens.data(), bytes.data(), bytes.size());
      const std::string text = t.decode(tokens, argc < 5);
      put(text.data(), text.size(), 1);
    }
  }
} catch (const horner::Error& e) {
  std::cerr << e.what() << "\n";
  return 2;
}

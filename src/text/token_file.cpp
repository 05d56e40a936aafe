// Files of tokens.
#include "text/token_file.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "core/check.h"
#include "files/output.h"

namespace horner::text {

namespace {

constexpr size_t kHeader = 256 * sizeof(int32_t);
struct Kind {
  int32_t magic, version;
  size_t width;
};
constexpr Kind kNarrow{20240520, 1, 2}, kWide{20240801, 7, 4};

}  // namespace

TokenFile open_tokens(const std::filesystem::path& path) {
  const auto file = std::make_shared<const files::MappedFile>(path);
  const size_t bytes = file->bytes().size();
  const std::string name = "'" + path.string() + "'";
  int32_t header[3] = {};
  if (bytes >= sizeof header) std::memcpy(header, file->bytes().data(), sizeof header);
  for (const Kind& k : {kNarrow, kWide}) {
    if (header[0] != k.magic) continue;
    check(header[1] == k.version, name, ": version must be ", k.version, " with magic ", k.magic,
          ", got ", header[1]);
    check(header[2] >= 0, name, ": token count must not be negative, got ", header[2]);
    const size_t wanted = kHeader + size_t(header[2]) * k.width;
    check(bytes == wanted, name, ": its header says ", header[2], " tokens, which take ", wanted,
          " bytes, but it has ", bytes, "; it is truncated or damaged");
    return {"llm.c", size_t(header[2]), k.width, kHeader, file};
  }
  check(bytes > 0 && bytes % 2 == 0, name, " is not a token file: it lacks llm.c's magic, and ",
        bytes, " bytes cannot be 16-bit tokens (nanoGPT)");
  return {"nanoGPT", bytes / 2, 2, 0, file};
}

Token token_at(const TokenFile& f, size_t i) {
  int64_t token;
  copy_tokens(f, i, {&token, 1});
  return Token(token);
}

void copy_tokens(const TokenFile& f, size_t begin, std::span<int64_t> out) {
  check(begin <= f.size && out.size() <= f.size - begin, "tokens ", begin, " to ",
        begin + out.size(), " are out of range: the file has ", f.size);
  // Aligned: the mapping starts at a page, and the header is a multiple of either width.
  const std::byte* at = f.file->bytes().data() + f.offset + begin * f.width;
  if (f.width == 4)
    std::copy_n(reinterpret_cast<const uint32_t*>(at), out.size(), out.begin());
  else
    std::copy_n(reinterpret_cast<const uint16_t*>(at), out.size(), out.begin());
}

template <class T>
static size_t first_beyond(const TokenFile& f, int64_t vocabulary) {
  constexpr size_t kPart = 1 << 12, kForget = 1 << 24;
  const T* const tokens = reinterpret_cast<const T*>(f.file->bytes().data() + f.offset);
  for (size_t at = 0; at < f.size; at += kPart) {
    const size_t n = std::min(kPart, f.size - at);
    T most = 0;
    for (size_t i = 0; i < n; ++i) most = std::max(most, tokens[at + i]);
    for (size_t i = 0; most >= vocabulary && i < n; ++i)
      if (tokens[at + i] >= vocabulary) return at + i;
    if ((at + kPart) % kForget == 0) f.file->forget(f.offset + at * sizeof(T));
  }
  return f.size;
}

size_t first_beyond(const TokenFile& f, int64_t vocabulary) {
  return f.width == 4 ? first_beyond<uint32_t>(f, vocabulary)
                      : first_beyond<uint16_t>(f, vocabulary);
}

bool is_token_file(std::string_view bytes) {
  int32_t magic = 0;
  if (bytes.size() >= kHeader) std::memcpy(&magic, bytes.data(), sizeof magic);
  return magic == kNarrow.magic || magic == kWide.magic;
}

// The name of the n-th file of a writer.
static std::filesystem::path numbered(const std::filesystem::path& path, size_t n) {
  if (n == 0) return path;
  char number[32];
  std::snprintf(number, sizeof number, "_%06zu", n);
  std::filesystem::path out = path;
  return out.replace_filename(path.stem().string() + number + path.extension().string());
}

std::vector<std::filesystem::path> TokenWriter::existing(const std::filesystem::path& path) {
  std::vector<std::filesystem::path> out;
  for (size_t n = 0; n == 0 || std::filesystem::exists(numbered(path, n)); ++n)
    out.push_back(numbered(path, n));
  return out;
}

TokenWriter::TokenWriter(const std::filesystem::path& path, size_t vocabulary, size_t most)
    : path_(path), most_(most), wide_(vocabulary > 65536) {
  check(most > 0 && most <= kMostTokens, "a token file must hold 1 to ", kMostTokens,
        " tokens, got ", most);
  size_t n = 0;  // a killed writer leaves a temporary file after its last complete one
  do {
    files::remove_leftovers(numbered(path, n));
  } while (std::filesystem::exists(numbered(path, n++)));
  open();
}

TokenWriter::~TokenWriter() = default;

void TokenWriter::open() {
  const std::filesystem::path path = numbered(path_, files_.size());
  file_ = std::make_unique<files::NewFile>(path);
  files_.push_back(path);
  in_file_ = 0;
  const std::array<int32_t, 256> header = {};
  file_->write(std::as_bytes(std::span(header)));
}

void TokenWriter::close() {
  const Kind& kind = wide_ ? kWide : kNarrow;
  const int32_t header[3] = {kind.magic, kind.version, int32_t(in_file_)};
  file_->write_at(0, std::as_bytes(std::span(header)));
  file_->commit();
  file_.reset();
}

void TokenWriter::write(std::span<const Token> tokens) {
  while (!tokens.empty()) {
    if (in_file_ == most_) {
      close();
      open();
    }
    const auto part = tokens.first(std::min(tokens.size(), most_ - in_file_));
    if (wide_) {
      file_->write(std::as_bytes(part));
    } else {
      const std::vector<uint16_t> narrow(part.begin(), part.end());
      file_->write(std::as_bytes(std::span(narrow)));
    }
    in_file_ += part.size();
    written_ += part.size();
    tokens = tokens.subspan(part.size());
  }
}

void TokenWriter::finish() {
  close();
}

}  // namespace horner::text

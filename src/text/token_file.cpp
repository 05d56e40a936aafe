// Files of tokens.
#include "text/token_file.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "core/check.h"

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

TokenWriter::TokenWriter(const std::filesystem::path& path, size_t vocabulary, size_t most)
    : path_(path), most_(most), wide_(vocabulary > 65536) {
  check(most > 0 && most <= kMostTokens, "a token file must hold 1 to ", kMostTokens,
        " tokens, got ", most);
  open();
}

TokenWriter::~TokenWriter() = default;

void TokenWriter::open() {
  std::filesystem::path path = path_;
  if (!files_.empty()) {
    char number[16];
    std::snprintf(number, sizeof number, "_%06zu", files_.size());
    path.replace_filename(path_.stem().string() + number + path_.extension().string());
  }
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

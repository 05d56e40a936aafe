// Files of tokens, mapped into memory.
//   llm.c    256 × int32 (magic, version, count, 0 …), then the tokens
//            magic 20240520: uint16, version 1 · magic 20240801: uint32, version 7
//   nanoGPT  uint16 tokens without a header
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "files/files.h"
#include "text/tokenizer.h"

namespace horner::text {

struct TokenFile {
  std::string layout;  // "llm.c" or "nanoGPT"
  size_t size;         // tokens
  size_t width;        // bytes of each
  size_t offset;       // of the first, in the file
  std::shared_ptr<const files::MappedFile> file;
};

// Without llm.c's magic, any file of even size is read as nanoGPT's, which has no header.
TokenFile open_tokens(const std::filesystem::path&);

Token token_at(const TokenFile&, size_t);
void copy_tokens(const TokenFile&, size_t begin, std::span<int64_t> out);

// The position of the first token that is not below `vocabulary`; the file's size if all are.
size_t first_beyond(const TokenFile&, int64_t vocabulary);

bool is_token_file(std::string_view bytes);  // by llm.c's magic

// Writes llm.c's layout. Its count has 31 bits: further tokens go to name_000001.bin and following.
// Each file appears when it is full, the last one at finish().
class TokenWriter {
 public:
  static constexpr size_t kMostTokens = 0x7FFFFFFF;

  // Tokens are below `vocabulary` and get 16 bits if that is enough.
  TokenWriter(const std::filesystem::path&, size_t vocabulary, size_t most = kMostTokens);
  // The files that it may replace: `path` and its numbered ones that exist already.
  static std::vector<std::filesystem::path> existing(const std::filesystem::path& path);
  ~TokenWriter();

  void write(std::span<const Token>);
  void finish();  // without it the last file is discarded

  size_t written() const { return written_; }
  const std::vector<std::filesystem::path>& files() const { return files_; }

 private:
  void open();
  void close();

  std::filesystem::path path_;
  size_t most_, written_ = 0, in_file_ = 0;
  bool wide_;
  std::unique_ptr<files::NewFile> file_;
  std::vector<std::filesystem::path> files_;
};

}  // namespace horner::text

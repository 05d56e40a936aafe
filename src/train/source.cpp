#include "train/source.h"

#include <algorithm>
#include <memory>

#include "core/check.h"
#include "core/random.h"
#include "text/corpus.h"
#include "text/token_file.h"

namespace horner::train {

namespace {

struct Text {
  size_t size = 0;
  std::function<void(size_t begin, std::span<int64_t>)> copy = {};
  std::function<void(int64_t V)> check_tokens = [](int64_t) {};
};

Text bytes_of(const std::vector<std::filesystem::path>& files) {
  auto all = std::make_shared<std::string>();
  for (const auto& file : files) all->append(files::MappedFile(file).text());
  return {all->size(), [all](size_t begin, std::span<int64_t> out) {
            for (size_t i = 0; i < out.size(); ++i) out[i] = uint8_t((*all)[begin + i]);
          }};
}

Text tokens_of(const std::filesystem::path& path) {
  const text::TokenFile file = text::open_tokens(path);
  return {file.size,
          [file](size_t begin, std::span<int64_t> out) { text::copy_tokens(file, begin, out); },
          [file](int64_t V) {
            const size_t at = text::first_beyond(file, V);
            check(at == file.size, file.file->path().string(), ": token ", at, " is ",
                  at < file.size ? text::token_at(file, at) : 0,
                  ", but the model's vocabulary has ", V, " tokens, 0 to ", V - 1,
                  "; pack the text with the model's tokenizer");
          }};
}

}  // namespace

// T tokens and the T that follow them by one.
static void copy_shifted(const Text& text, size_t begin, std::span<int64_t> tokens,
                         std::span<int64_t> targets) {
  std::vector<int64_t> drawn(tokens.size() + 1);
  text.copy(begin, drawn);
  std::copy(drawn.begin(), drawn.end() - 1, tokens.begin());
  std::copy(drawn.begin() + 1, drawn.end(), targets.begin());
}

// Evenly spread over the file for any number of sequences, the same for every seed.
static size_t fixed_position(uint64_t index, size_t positions) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;  // 2^64 / φ
  return size_t((static_cast<unsigned __int128>(index * kGolden) * positions) >> 64);
}

Source text_source(const std::filesystem::path& token_file, uint64_t seed,
                   const std::filesystem::path& validation) {
  const bool bytes = token_file.empty(), apart = !validation.empty();
  const Text text = bytes ? bytes_of(text::default_corpus()) : tokens_of(token_file);
  const Text other = apart ? tokens_of(validation) : Text{};
  // Up to 64 pieces of a million tokens or more, a twentieth of each held out: validation covers
  // all parts of a text.
  const size_t pieces = std::clamp<size_t>(text.size >> 20, 1, 64), piece = text.size / pieces;
  const size_t held = apart ? 0 : piece / 20, train = piece - held;
  const std::string name = bytes ? "the default text" : token_file.string();
  const auto fill = [=](Split split, uint64_t index, std::span<int64_t> tokens,
                        std::span<int64_t> targets) {
    const bool fixed = apart && split == Split::validation;
    const size_t T = tokens.size(), size = fixed                   ? other.size
                                           : split == Split::train ? train
                                                                   : held;
    check(size > T, fixed ? validation.string() : name, " has ",
          pieces > 1 && !fixed ? "pieces of " : "", size, " tokens for ",
          split == Split::train ? "training" : "validation", "; sequences of ", T,
          " tokens require at least ", T + 1);
    if (fixed) return copy_shifted(other, fixed_position(index, size - T), tokens, targets);
    const size_t at = random_bits(seed, uint64_t(split), index) % (pieces * (size - T));
    copy_shifted(text,
                 at / (size - T) * piece + (split == Split::train ? 0 : train) + at % (size - T),
                 tokens, targets);
  };
  const auto check_tokens = [=](int64_t V) { text.check_tokens(V), other.check_tokens(V); };
  return {name, bytes ? 256 : 0, fill, check_tokens};
}

}  // namespace horner::train

#include "train/source.h"

#include <memory>

#include "core/check.h"
#include "nn/corpus.h"
#include "nn/token_file.h"

namespace horner::train {

namespace {

// SplitMix64's finaliser (Steele, Lea and Flood 2014): every input bit reaches every output bit.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

struct Text {
  size_t size;
  std::function<void(size_t begin, std::span<int64_t>)> copy;
};

Text bytes_of(const std::vector<std::filesystem::path>& files) {
  auto all = std::make_shared<std::string>();
  for (const auto& file : files) all->append(MappedFile(file).text());
  return {all->size(), [all](size_t begin, std::span<int64_t> out) {
            for (size_t i = 0; i < out.size(); ++i) out[i] = uint8_t((*all)[begin + i]);
          }};
}

Text tokens_of(const std::filesystem::path& path) {
  const nn::TokenFile file = nn::open_tokens(path);
  return {file.size,
          [file](size_t begin, std::span<int64_t> out) { nn::copy_tokens(file, begin, out); }};
}

}  // namespace

uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;
  return mixed(mixed(mixed(seed + kGolden) + stream * kGolden) + (index + 1) * kGolden);
}

Source text_source(const std::filesystem::path& token_file, uint64_t seed) {
  const bool bytes = token_file.empty();
  const Text text = bytes ? bytes_of(nn::default_corpus()) : tokens_of(token_file);
  const size_t held = text.size / 20, train = text.size - held;
  const std::string name = bytes ? "the default text" : token_file.string();
  const auto fill = [=](Split split, uint64_t index, std::span<int64_t> tokens,
                        std::span<int64_t> targets) {
    const size_t T = tokens.size(), size = split == Split::train ? train : held;
    check(size > T, name, " has ", size, " tokens for ",
          split == Split::train ? "training" : "validation", ", too few for sequences of ", T,
          " tokens and their next");
    const size_t begin = random_bits(seed, uint64_t(split), index) % (size - T);
    std::vector<int64_t> piece(T + 1);
    text.copy((split == Split::train ? 0 : train) + begin, piece);
    std::copy(piece.begin(), piece.end() - 1, tokens.begin());
    std::copy(piece.begin() + 1, piece.end(), targets.begin());
  };
  return {name, bytes ? 256 : 0, fill};
}

}  // namespace horner::train

// Random numbers as functions of a key: the same on every machine, whatever else is drawn.
#pragma once

#include <cstdint>
#include <string_view>

namespace horner {

// SplitMix64's finaliser (Steele, Lea and Flood 2014): every input bit reaches every output bit.
constexpr uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Random bits, a function of the three numbers: of_stream is what those of a stream share.
inline constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;
constexpr uint64_t of_stream(uint64_t seed, uint64_t stream) {
  return mixed(mixed(seed + kGoldenRatio) + stream * kGoldenRatio);
}
constexpr uint64_t random_bits(uint64_t stream, uint64_t index) {
  return mixed(stream + (index + 1) * kGoldenRatio);
}
constexpr uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  return random_bits(of_stream(seed, stream), index);
}

// FNV-1a, 64 bits: the stream that belongs to a name.
inline uint64_t stream_of(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : name) hash = (hash ^ uint8_t(c)) * 0x100000001B3;
  return hash;
}

}  // namespace horner

#include "core/crc32c.h"

#include <array>
#include <cstring>

namespace horner {

// The polynomial with its bits reversed, a byte at a time.
static constexpr auto kTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = c >> 1 ^ (c & 1 ? 0x82f63b78u : 0);
    table[i] = c;
  }
  return table;
}();

static uint32_t by_table(uint32_t c, std::string_view bytes) {
  for (const char b : bytes) c = c >> 8 ^ kTable[(c ^ uint8_t(b)) & 255];
  return c;
}

#ifdef __x86_64__
// SSE 4.2 has an instruction for eight bytes: gigabytes per second, where the table takes 2 ns a
// byte.
__attribute__((target("sse4.2"))) static uint32_t by_words(uint32_t c, std::string_view bytes) {
  uint64_t wide = c;
  for (; bytes.size() >= 8; bytes.remove_prefix(8)) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  return by_table(uint32_t(wide), bytes);
}
#endif

uint32_t crc32c(std::string_view bytes) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("sse4.2")) return ~by_words(~0u, bytes);
#endif
  return ~by_table(~0u, bytes);
}

}  // namespace horner

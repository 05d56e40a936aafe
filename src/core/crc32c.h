// CRC-32C (Castagnoli), the checksum of TensorBoard's records and of our checkpoints. It notices
// every change within 32 consecutive bits, and any other but for one in 2^32.
#pragma once

#include <cstdint>
#include <string_view>

namespace horner {

uint32_t crc32c(std::string_view bytes);

}  // namespace horner

// The machine: processor name, memory, and the speed of its matrix products.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace horner::train {

std::string processor_name();
int64_t process_peak_bytes();  // peak resident memory

// FLOP/s of a product of large matrices, measured now: 0.1 s or so.
double matmul_peak(at::Device, at::ScalarType);

}  // namespace horner::train

// The memory of this process, and the speed of the matrix products of this machine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace horner::train {

int64_t process_peak_bytes();  // peak resident memory

// FLOP/s of a product of large matrices, measured now: 0.1 s or so.
double matmul_peak(at::Device, at::ScalarType);

}  // namespace horner::train

// What the machine is and can: names, memory, and the speed of its matrix products.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace horner::train {

std::string processor_name();
int64_t process_peak_bytes();  // the most memory this process has had

// Multiplications and additions a second in products of large matrices, measured in a moment.
double matmul_peak(at::Device, at::ScalarType);

}  // namespace horner::train

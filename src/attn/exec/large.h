// Tensors of 4 MB and more. What malloc gives back to the system, of freed blocks of that size some
// and of those above 32 MB all, the system clears again for the next tensor, a page at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include "attn/exec/autograd.h"

namespace horner::attn::exec {

// at::empty on the CPU. A large block, in pages of 2 MB, is kept when it is freed, for the next of
// its size; 1 GB of them at most.
at::Tensor large_empty(at::IntArrayRef sizes, const at::TensorOptions&);

// at::split, in a node whose gradient is of such memory.
TensorVector parts(std::string_view execution, const at::Tensor&, int64_t length, int64_t axis);

}  // namespace horner::attn::exec

// decode_cpu.h on an NVIDIA GPU, in float32: the same problem with pointers to the GPU's memory.
// The keys and the features are shared by blocks of threads, whose parts of N and W are then
// summed.
#pragma once

#include "attn/kernels/cpu/decode/decode.h"

struct CUstream_st;

namespace horner::attn::kernels::cuda {

inline constexpr int kMaxDecodeChannels = 256;
inline constexpr int kMaxDecodeOrder = 3;

int64_t decode_scratch(const Decode<float>&);  // numbers that `decode_attend` needs
// Each throws core/check.h's Error where the GPU refuses.
void decode_attend(const Decode<float>&, float* scratch, CUstream_st*);
void decode_fold(const Decode<float>&, CUstream_st*);

}  // namespace horner::attn::kernels::cuda

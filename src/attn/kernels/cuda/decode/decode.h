// The decode step of cpu/decode/decode.h on an NVIDIA GPU, in float32: the same problem struct with
// device pointers. Thread blocks split the KV cache and the features of the state; a second kernel
// combines their parts of N and W.
#pragma once

#include "attn/kernels/cpu/decode/decode.h"

struct CUstream_st;

namespace horner::attn::kernels::cuda {

inline constexpr int kMaxDecodeChannels = 256;
inline constexpr int kMaxDecodeOrder = 3;

int64_t decode_scratch(const Decode<float>&);  // floats that `decode_attend` needs
// Each throws core/check.h's Error on failure.
void decode_attend(const Decode<float>&, float* scratch, CUstream_st*);
void decode_fold(const Decode<float>&, CUstream_st*);

}  // namespace horner::attn::kernels::cuda

// The CPU kernels of the instruction set that is in use.
#pragma once

#include <tuple>

#include "attn/kernels/cpu/channels/channels.h"
#include "attn/kernels/cpu/chunked/chunked.h"
#include "attn/kernels/cpu/decode/decode.h"
#include "attn/kernels/cpu/fused/fused.h"
#include "attn/kernels/cpu/rows/rows.h"

namespace horner::attn::exec {

struct CpuKernels {
  const kernels::FusedKernels* fused;
  const kernels::FusedKernels* fused_bf16;  // null: bfloat16 inputs are converted to float32
  const kernels::RowKernels* rows;
  using States =
      std::tuple<const kernels::ChunkedKernels<float>*, const kernels::ChunkedKernels<double>*,
                 const kernels::DecodeKernels<float>*, const kernels::DecodeKernels<double>*,
                 const kernels::ChannelKernels<float>*, const kernels::ChannelKernels<double>*>;
  States states;
};

const CpuKernels& isa();  // of simd::isa()

}  // namespace horner::attn::exec

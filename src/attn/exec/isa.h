// Which build of the CPU kernels runs.
#pragma once

#include <span>
#include <string_view>

#include "attn/kernels/cpu/chunked/chunked.h"
#include "attn/kernels/cpu/decode/decode.h"
#include "attn/kernels/cpu/fused/fused.h"
#include "attn/kernels/cpu/rows/rows.h"

namespace horner::attn::exec {

struct Isa {
  std::string_view name;
  const kernels::FusedKernels* fused;
  const kernels::FusedKernels* fused_bf16;  // null: bfloat16 inputs become float32
  const kernels::RowKernels* rows;
  struct States {
    const kernels::ChunkedKernels<float>* chunked_float;
    const kernels::ChunkedKernels<double>* chunked_double;
    const kernels::DecodeKernels<float>* decode_float;
    const kernels::DecodeKernels<double>* decode_double;
  } states;
  bool (*here)();  // whether this CPU has it
};

std::span<const Isa> instruction_sets();  // best first

// The best that this CPU has, or the one that the environment variable HORNER_CPU names; throws,
// with the possible ones, when that is not one of them.
const Isa& isa();

}  // namespace horner::attn::exec

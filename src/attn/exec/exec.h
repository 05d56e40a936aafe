// The executions. Private to attn/: everyone else calls attend().
#pragma once

#include "attn/attend.h"

namespace horner::attn::exec {

extern const Execution chunked, chunked_cuda, fused_cpu, fused_cuda, hopper_cuda, recurrent,
    reference;

// The part of fused_cpu for weights and sharpness that need the whole row (rows_cpu.cpp).
at::Tensor attend_by_rows(const Spec&, const Inputs&, Statistics*);

}  // namespace horner::attn::exec

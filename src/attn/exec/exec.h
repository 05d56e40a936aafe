// The executions. Private to attn/: everyone else calls attend().
#pragma once

#include "attn/attend.h"

namespace horner::attn::exec {

extern const Execution chunked, chunked_cuda, fused_cpu, fused_cuda, hopper_cuda, recurrent,
    reference;

// The executions that a build may lack, without their functions: `complete` adds those, in
// <name>.cpp or, where torch has no CUDA, in cuda_stub.cpp.
inline constexpr Execution kHopperCuda{
    .name = "hopper_cuda", .about = "fused_cuda for compute capability 9.0 (wgmma, TMA)"};
inline constexpr Execution kFusedCuda{
    .name = "fused_cuda",
    .about = "one pass over tiles of keys, on an NVIDIA GPU (tensor cores, sm_80 or newer)"};
inline constexpr Execution kChunkedCuda{
    .name = "chunked_cuda",
    .about = "chunks of tokens with a state between them, on an NVIDIA GPU: linear time",
    .statistics = false};
constexpr Execution complete(Execution e, decltype(e.why_not) why_not, decltype(e.run) run,
                             decltype(e.work) work = nullptr) {
  e.why_not = why_not, e.run = run, e.work = work;
  return e;
}

// The part of fused_cpu for weights and sharpness that need the whole row (rows_cpu.cpp).
at::Tensor attend_by_rows(const Spec&, const Inputs&, Statistics*);

}  // namespace horner::attn::exec

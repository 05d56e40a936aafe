// The executions. Private to attn/: everyone else calls attend().
#pragma once

#include "attn/attend.h"
#include "attn/carry.h"

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
                             decltype(e.work) work = nullptr, decltype(e.kept) kept = nullptr) {
  e.why_not = why_not, e.run = run, e.work = work, e.kept = kept;
  return e;
}

// The stages that not every execution has.
struct Has {
  bool softcap = false, bias = false, sink = false, near = false, delta = false;
  bool channel_decay = false, dropout = false, near_share = false;
  bool first_keys = false;               // masks that see more than one interval: streaming, prefix
  bool softpick = false, stick = false;  // weights
};
// "" if a spec needs no stage that is not there, else which.
std::string why_lacking(const Spec&, const Has&);
// `chunked`, `recurrent` and finite states.
inline constexpr Has kChunkedHas{
    .sink = true, .near = true, .delta = true, .channel_decay = true, .near_share = true};

// A spec and inputs without the gates of channels that the result `o` of the rest can be multiplied
// by afterwards. For executions that have gates of heads only.
struct WithoutChannelGates {
  Spec spec;
  Inputs in;
  at::Tensor after;  // [B, H, T, E], or undefined

  WithoutChannelGates(const Spec&, const Inputs&);
  static std::string why_not(const Spec&);  // "" where that is possible
  at::Tensor finish(const at::Tensor& o) const { return after.defined() ? gated(o) : o; }

 private:
  at::Tensor gated(const at::Tensor& o) const;
};

inline constexpr const char* kOneStream =
    "a state belongs to one stream: packed sequences (cu_seqlens) are not supported";
inline constexpr const char* kNoOtherKeys =
    "does not support packed sequences with other numbers of keys than of queries (cu_seqlens_k)";

// The result of no keys; of an execution whose inputs may have NaN among their log gates
// (unusual.cpp).
at::Tensor without_keys(const Inputs&, Statistics*);
at::Tensor run_with_gates(const Execution&, const Spec&, const Inputs&, Statistics*);
bool has_nan_gates(const Inputs&);  // waits for the device
// The inputs with log gates of 0 for those that are NaN, and what the rows of their result are to
// be multiplied by, 1 or NaN: [B, H, T, 1], undefined where there are no gates.
std::pair<Inputs, at::Tensor> without_nan_gates(const Spec&, const Inputs&);

// [B, H, T, 1]: NaN for the rows that see a key before a gate that is NaN, 1 for the others. Of
// each row the first key that it sees and the last [1 or B, T], int64; nan [B, G, S, ..].
at::Tensor spoiled_rows(const at::Tensor& nan, const at::Tensor& first, const at::Tensor& last,
                        const Inputs&);

// The inputs of a step without idle gates; those are part of the sum of all that a state keeps.
Inputs after_first_keys(const Inputs&, Carry&);

// The running sums of log gates [B, G, n] that follow those `before` [B, G, any]. `of_keys`: a NaN
// counts as 0, and makes all sums before it NaN instead: of keys that later queries may not see.
at::Tensor running_gates(at::Tensor logs, const at::Tensor& before, bool of_keys);

// The part of fused_cpu for weights and sharpness that need the whole row (rows_cpu.cpp).
at::Tensor attend_by_rows(const Spec&, const Inputs&, Statistics*);
c10::SymInt kept_by_rows(const Spec&, const Inputs&);

}  // namespace horner::attn::exec

// fused_cpu for a sequence over several ranks: the keys and values go round.
#pragma once

#include "attn/exec/cpu.h"
#include "attn/split.h"

namespace horner::attn::exec {

// [B, H, T, E] of this rank's T tokens. `seen`: the keys that each of its queries sees, counted
// from the first token of all ranks.
at::Tensor attend_round(const Spec&, const Inputs& own, const Split&, const Intervals& seen);

}  // namespace horner::attn::exec

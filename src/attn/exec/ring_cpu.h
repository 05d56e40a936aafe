// fused_cpu for a sequence over several ranks: the keys and values go round.
#pragma once

#include <functional>

#include "attn/exec/cpu.h"

namespace horner::attn::exec {

struct Ring {
  int rank, ranks;
  std::function<at::Tensor(const at::Tensor& x)> pass;  // to the next rank; x of the one before
  Intervals seen;  // what the queries of this rank see, counted from the first token of all ranks
  at::Tensor decay_before;  // [B, G], double: the sum of the log gates of the ranks before this one
};

// [B, H, T, E] of this rank's T tokens.
at::Tensor attend_round(const Spec&, const Inputs& own, const Ring&);

}  // namespace horner::attn::exec

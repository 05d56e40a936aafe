// Ring attention: one sequence over several ranks, which pass blocks of keys and values round. Each
// rank computes the sums over one block after another and merges them:
//   m = max(m_1, m_2),  N = e^(m_1 - m) N_1 + e^(m_2 - m) N_2,  W likewise
// Denominator, gates and norm follow the last block. Backward takes one block at a time too, from
// the merged N, W and m: each block adds to dq, and its dk and dv travel with it.
#pragma once

#include <functional>

#include "attn/exec/autograd.h"
#include "attn/exec/cpu.h"

namespace horner::attn::exec {

struct Ring {
  int rank, ranks;
  std::function<at::Tensor(const at::Tensor& x)> pass;  // to the next rank; x of the one before
  Intervals seen;  // what the queries of this rank see, counted from the first token of all ranks;
                   // on the CPU
  at::Tensor decay_before;  // [B, G], double: the sum of the log gates of the ranks before this one

  int64_t tokens() const { return seen.hi.size(0); }  // of each rank
  at::Tensor count() const;                           // [1, 1, T, 1]: how many keys each query sees
  Intervals of_block(int owner) const { return seen.of_keys(owner * tokens(), tokens()); }
};

// [B, H, T, E] of this rank's T tokens: on the CPU by the kernels of fused_cpu, on an NVIDIA GPU by
// those of fused_cuda.
at::Tensor attend_round(const Spec&, const Inputs& own, const Ring&);
at::Tensor attend_round_on_gpu(const Spec&, const Inputs& own, const Ring&);

// The loops that the executions share. They call `of_block` for this rank's own block of keys, then
// for each block that arrives and has a key that some query sees. The tensors of keys (k, v, gate,
// decay) are those of the block's owner.
struct BlockSums {
  at::Tensor N, W, shift;  // [B, H, T, E], [B, H, T] twice, float32
};
BlockSums sums_round(
    const Ring&, const FusedTensors& own, bool shifted,
    const std::function<BlockSums(int owner, const FusedTensors& block)>& of_block);
FusedTensors gradients_round(
    const Ring&, const FusedTensors& own,
    const std::function<FusedTensors(int owner, const FusedTensors& block)>& of_block);

}  // namespace horner::attn::exec

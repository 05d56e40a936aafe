// What fused_cpu runs on its kernels. ring_cpu.cpp runs it on one block of keys after another.
#pragma once

#include "attn/exec/autograd.h"
#include "attn/exec/cpu.h"
#include "attn/kernels/cpu/fused/fused.h"

namespace horner::attn::exec {

// What the kernels need besides the differentiable tensors.
struct TileJob {
  kernels::Pointwise weight;
  float clamp, scale, softcap;
  int64_t near;
  Intervals seen;
  at::Tensor keep;
  // Where the queries are not at the places of the last keys: their running sums of log gates
  // [B, G, T], and what the gradients of those are added to.
  at::Tensor query_decay, d_query_decay;
  Dropout dropout;
  at::Tensor statistics;         // [4, B, H, T] to write to, or undefined
  at::Tensor log_sum;            // [B, H, T], likewise
  kernels::Epilogue epilogue{};  // without its pointers
};

struct TileResult {
  at::Tensor o, N, W, shift;

  static auto outputs(auto& r) { return std::array{&r.o}; }
  static auto saved(auto& r) { return std::array{&r.N, &r.W, &r.shift}; }
};

// The job and the tensors of a spec whose weights are of one score each and whose gates are of
// heads.
std::pair<TileJob, FusedTensors> tiles_of(const Spec&, const Inputs&, const Prepared&);
bool counts_keys(const Spec&);  // whether that needs Prepared::count

TileResult tiles_forward(const TileJob&, const FusedTensors&, bool for_backward);
FusedTensors tiles_backward(const TileJob&, const FusedTensors&, const TileResult&,
                            const TileResult& grads);

}  // namespace horner::attn::exec

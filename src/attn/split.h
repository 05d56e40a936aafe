// One sequence over several ranks (context parallelism): each has the next T tokens. Attention of
// this rank's queries to the keys of all ranks up to them, forward and backward.
//   finite state: every rank sums its own tokens; the sums are gathered, and each rank combines
//     those before it (an exclusive scan): S_r = sum over j < r of decay_j+1..r-1 S_j. What travels
//     does not grow with the length. The delta rule changes a state by a matrix, S -> A S + B,
//     which travels with B. Not where a block of keys is smaller than a state and can go round.
//   sums over keys that can be merged: the keys and values go round the ring of ranks, a block of
//     one rank after another. Each rank adds what its queries take from a block to their sums; the
//     gradients of a block travel with it and come home.
//   otherwise: the keys and values of all ranks are gathered.
// On an NVIDIA GPU the states are those of exec/series.h and the blocks run on the kernels of
// fused_cuda; gates of channels and polynomials of centred scores are gathered.
#pragma once

#include <functional>

#include "attn/attend.h"

namespace horner::attn {

// What moves tensors between the ranks of one sequence, without gradients.
struct Split {
  int rank = 0, ranks = 1;
  std::function<at::Tensor(const at::Tensor& x)> gather;       // x of every rank: [ranks, ..]
  std::function<at::Tensor(const at::Tensor& x)> scatter_sum;  // [ranks, ..]: the sum of x[rank]
  std::function<at::Tensor(const at::Tensor& x)> pass;  // to the next rank; x of the one before
};

// [ranks, ..], differentiable. Every rank of the split makes the same calls in the same order, and
// its loss depends on what it gets: the backward pass is a call as well.
at::Tensor gathered(const Split&, const at::Tensor& x);

// The last n rows of the rank before this one along an axis; zeros on the first rank.
at::Tensor rows_before(const Split&, const at::Tensor& x, int64_t axis, int64_t n);

// Sum over the ranks before this one; zeros on the first.
at::Tensor sum_before(const Split&, const at::Tensor& x);

// Why a sequence cannot be divided over ranks; "" if it can.
std::string why_no_split(const Spec&);

// What travels: states, the keys and values of one rank after another, or those of all ranks.
enum class Travels { states, blocks_of_keys, all_keys };

struct SplitShape {
  int64_t B, G, D, E, tokens;  // tokens: of each rank
  int64_t element;             // bytes of an element of keys and values
  bool on_gpu;
};

// The choice of attend_split: a state, unless there is none or a block of keys and values, which
// can go round, has fewer bytes. The second also depends on what the inputs and the execution
// support.
Travels travels(const Spec&, const SplitShape&);
Travels travels(const Spec&, const Inputs&, std::string_view execution = "auto");

// Bytes of a message: the state of a rank's tokens; its keys and values with their gates.
double state_message(const Spec&, const SplitShape&);
double block_message(const Spec&, const SplitShape&);

// [B, H, T, E] of this rank's T tokens, whose inputs are given; `cu_seqlens` counts the tokens of
// all ranks, as if they were one sequence.
at::Tensor attend_split(const Spec&, const Inputs&, const Split&,
                        std::string_view execution = "auto");

// The same in one of the ways that are possible, whatever has fewer bytes.
at::Tensor attend_split(const Spec&, const Inputs&, const Split&, Travels,
                        std::string_view execution = "auto");

}  // namespace horner::attn

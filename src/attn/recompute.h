// Activation recomputation: a part of the graph that keeps only its inputs and runs again in the
// backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

namespace horner::attn {

using Tensors = std::vector<at::Tensor>;

// run(inputs), which may also read `parameters`. Those are leaves. All tensors must be defined.
Tensors recomputed(const std::function<Tensors(const Tensors& inputs)>& run, const Tensors& inputs,
                   const Tensors& parameters);

// Pieces of tokens, of which each starts from the state that the one before it leaves.
struct Chain {
  // From a piece of each input and the state before it: its result [B, H, T, E], or none, and the
  // state after it. Tensors of a state may be undefined, inputs not.
  std::function<std::pair<at::Tensor, Tensors>(const Tensors& inputs, const Tensors& state)> run;
  std::vector<int64_t> axes;  // of the tokens of each input; -1: every piece takes all of it
  int64_t tokens, piece;      // of all pieces, and of one
};

// The results, one after the other, and the last state. Keeps the inputs and the states between the
// pieces. Backward runs each piece again, from the last: it takes the memory of the gradients and
// of one piece.
std::pair<at::Tensor, Tensors> chained(const Chain&, const Tensors& inputs, const Tensors& state);

}  // namespace horner::attn

// The delta rule, gates of channels, near keys and what else the kernels of chunked.h do not have,
// in linear time on an NVIDIA GPU: the branch of chunked_cuda for them, packed sequences, and the
// steps of a decoder. cuda_stub.cpp stands in where torch has no CUDA.
#pragma once

#include "attn/attend.h"
#include "attn/carry.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

inline bool has_other_sums(const Spec& spec) {
  return is<Delta>(spec.values) || is<ChannelGate>(spec.decay) || !is<NoKeys>(spec.near);
}
// Whether attend_linear takes the sums of series.h; else w(x) = x, and kernels have them.
bool is_by_series(const Spec&, const Inputs&);
// "" when there is a form for this spec, for heads of this shape.
std::string why_no_linear(const Spec&, const StateShape&);

at::Tensor attend_linear(const Spec&, const Inputs&);

// Packed sequences as one: the gate of each one's first token leaves nothing of those before it.
// Other inputs are returned as they are. A NaN or an infinity among the values of a sequence
// reaches the later ones, as 0 * NaN; so it does in `reference`.
std::pair<Spec, Inputs> with_forgetting(const Spec&, const Inputs&);

// N and W of tokens that follow a state, which becomes the one after them. Without gradients, and
// without idle gates.
Sums step_linear(const Spec&, const Inputs&, Carry&);

}  // namespace horner::attn::exec

// The delta rule and gates of channels in linear time on an NVIDIA GPU: the branch of chunked_cuda
// for them, and the steps of a decoder. cuda_stub.cpp stands in where torch
// has no CUDA.
#pragma once

#include "attn/attend.h"
#include "attn/carry.h"
#include "attn/plan.h"
#include "attn/stages.h"

namespace horner::attn::exec {

inline bool is_corrected_or_gated(const Spec& spec) {
  return is<Delta>(spec.values) || is<ChannelGate>(spec.decay);
}
bool is_linear(const Spec&);  // w(x) = x: kernels; other polynomials: series.h
// "" when there is a form for this spec, for heads of this shape.
std::string why_no_linear(const Spec&, const StateShape&);

at::Tensor attend_linear(const Spec&, const Inputs&);

// N and W of tokens that follow a state, which becomes the one after them. Without gradients.
Sums step_linear(const Spec&, const Inputs&, Carry&);

}  // namespace horner::attn::exec

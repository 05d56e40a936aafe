// Attention by the sums of series.h, on any device: on a GPU for what has no kernels in linear
// time.
#pragma once

#include <string>

#include "attn/attend.h"
#include "attn/carry.h"
#include "attn/stages.h"

namespace horner::attn::exec {

// N and W of a spec with a polynomial weight, causal and without gates of channels, with near keys.
// Continues from the state `before`, unless it is null, and writes the state after these tokens to
// `after`, unless that is null: S and z in double, S without padding, no `count`.
Sums sums_by_series(const Spec&, const Inputs&, const Carry* before, Carry* after);

// [B, H, T, E] of tokens that follow `before`, differentiable like attend_from (state.h). "": it
// can be done, for a spec without near keys.
std::string why_no_series(const Spec&);
at::Tensor attend_by_series(const Spec&, const Inputs&, const Carry& before, Carry& after);

// Multiplications of a forward pass, for each query head.
double work_by_series(const Spec&, const Inputs&);

}  // namespace horner::attn::exec

// Attention by the sums of series.h, on any device: the delta rule of series and near keys on a
// GPU.
#pragma once

#include "attn/attend.h"
#include "attn/carry.h"
#include "attn/stages.h"

namespace horner::attn::exec {

// N and W of a spec with a polynomial weight, causal and without gates of channels, with near keys;
// after a state, unless that is null, which becomes the one after these tokens. Without `count`.
Sums sums_by_series(const Spec&, const Inputs&, Carry* = nullptr);

// Multiplications of a forward pass, for each query head.
double work_by_series(const Spec&, const Inputs&);

}  // namespace horner::attn::exec

// A Spec as the formula that it stands for, in Unicode: one labelled line a stage.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "attn/spec.h"

namespace horner::attn {

// {"score", "x = q·k / √D"}, {"weight", "w = exp(x)"}, {"seen", "s ≤ t"},
// {"result", "o = Σ w v / Σ w"}, and {"where", …} for each name that these do not explain.
std::vector<std::pair<std::string, std::string>> formula(const Spec&);

}  // namespace horner::attn

// A Spec as text, and back: "weight=taylor(4),denominator=sum(plus=1),mask=window(64),output_gate".
// Printing, parsing and range checks share one description of the stages (words.h).
#pragma once

#include <string>
#include <string_view>

#include "attn/spec.h"

namespace horner::attn {

std::string text(const Spec&);                  // the stages in which it differs from softmax
Spec with(Spec base, std::string_view stages);  // `base` with the given stages changed
void check_spec(const Spec&);                   // throws unless every parameter is in its range

}  // namespace horner::attn

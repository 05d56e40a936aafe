// The settings of a call as a Spec.
#pragma once

#include <optional>
#include <string>

#include "attn/spec.h"

namespace horner::python {

using Text = std::optional<std::string>;
using Number = std::optional<double>;

// Every text is parsed once: calls with the same variant and mask share its Spec.
attn::Spec make_spec(const std::string& variant, const Text& mask, Number scale = {},
                     Number temperature = {}, Number clamp = {});

}  // namespace horner::python

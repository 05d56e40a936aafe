// The operators of a model's layers, and which of them have weights that can be analysed.
#pragma once

#include <string>
#include <vector>

#include "nn/config.h"

namespace horner::diag {

// "softmax", or the pattern of the layers' operators: "linear_decay*3,softmax".
std::string attention_of(const nn::ModelConfig&);

// The layers with weights to analyse. Throws, with the reason of the first layer, if there is none.
std::vector<int64_t> layers_with_rows(const nn::ModelConfig&);

// Of a model with several operators, which layers have which, and why some are not measured; ""
// for a model with one.
std::string layers_text(const nn::ModelConfig&);

}  // namespace horner::diag

// The operators of a model's layers, and which of them have weights that can be analysed.
#pragma once

#include <string>
#include <vector>

#include "nn/config.h"

namespace horner::diag {

// "softmax", or the pattern of the layers' operators: "linear_decay*3,softmax".
std::string attention_of(const nn::ModelConfig&);

// (layer, head).
using Heads = std::vector<std::pair<int64_t, int64_t>>;

// Why a head has no weights to analyse; "" if it has.
std::string why_no_rows(const nn::LayerConfig&, int64_t head);

// The heads with weights to analyse. Throws, with the reason of the first layer, if there is none.
Heads heads_with_rows(const nn::ModelConfig&);

// Of a model with several operators, which layers have which, and why some are not measured; ""
// for a model with one.
std::string layers_text(const nn::ModelConfig&);

}  // namespace horner::diag

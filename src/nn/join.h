// What layers keep of several texts, as one batch: attn/join.h for whole layers.
#pragma once

#include <string>
#include <vector>

#include "nn/model.h"

namespace horner::nn {

LayerState snapshot(const LayerState&);
LayerState select(const LayerState&, const at::Tensor& rows);
LayerState joined(const std::vector<LayerState>&);

// "" where texts of different lengths can be joined in every layer, else the reason.
std::string why_not_joined(const ModelConfig&);

}  // namespace horner::nn

// Hugging Face folders: config.json and model.safetensors, or several of them and their index.
#pragma once

#include <filesystem>

#include "nn/slots.h"

namespace horner::nn {

// The tensors are views of the mapped files unless the family stores them transposed. Errors name
// the folder and the tensor.
Model load_model(const std::filesystem::path& folder);
// The same with another config than the folder's. Weights of its variants that the folder does not
// have get random values.
Model load_model(const std::filesystem::path& folder, const ModelConfig&, uint64_t seed);

// Writes a folder that `transformers` and load_model read.
void save_model(const Model&, const std::filesystem::path& folder);

}  // namespace horner::nn

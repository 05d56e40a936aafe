// Hugging Face folders: config.json and model.safetensors, or several of them and their index.
#pragma once

#include <filesystem>

#include "files/tensors_file.h"
#include "nn/slots.h"

namespace horner::nn {

// The tensors are views of the mapped files unless the family stores them transposed or their rows
// in another order. Errors name the folder and the tensor.
Model load_model(const std::filesystem::path& folder);
// The same with another config than the folder's. Weights of its variants that the folder does not
// have get random values.
Model load_model(const std::filesystem::path& folder, const ModelConfig&, uint64_t seed);

// The tensors of slots as files have them.
files::TensorsFile stored_tensors(const std::vector<Slot>&);

// Writes a folder that `transformers` and load_model read.
void save_model(const Model&, const std::filesystem::path& folder);

}  // namespace horner::nn

// Hugging Face folders: config.json and model.safetensors, or several of them and their index.
#pragma once

#include <filesystem>

#include "nn/model.h"

namespace horner::nn {

// The file as JSON; an error names it.
Json read_json(const std::filesystem::path&);

// Views of the mapped files wherever they are kept as we use them. An error names the file and the
// tensor; nothing is half-loaded.
Model load_model(const std::filesystem::path& folder);
// The same with another config than the folder's; what another variant needs and the folder does
// not have begins as in a random model.
Model load_model(const std::filesystem::path& folder, const ModelConfig&, uint64_t seed);

// So that `transformers` opens it, and load_model does.
void save_model(const Model&, const std::filesystem::path& folder);

}  // namespace horner::nn

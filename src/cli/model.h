// The model that a command reads: a folder, or the newest checkpoint of a run.
#pragma once

#include <filesystem>

#include "nn/model.h"

namespace horner::cli {

// The folder with config.json: the given one, or the newest checkpoint of a run of 'horner train'.
std::filesystem::path model_folder(const std::filesystem::path& given);

// Its model on a device, in a dtype; Undefined keeps the dtype of the weights.
nn::Model load_model(const std::filesystem::path& folder, at::Device, at::ScalarType);

}  // namespace horner::cli

// How a run begins: its model, and the folder it writes to.
#pragma once

#include <filesystem>

#include "nn/checkpoint.h"
#include "train/settings.h"

namespace horner::train {

// A random model of a preset or a config.json, or the weights of a Hugging Face folder; with the
// attention and the fields of config.json that the settings have.
nn::Model start_model(const Settings&);

// Throws unless a run can begin or go on in `folder`; writes settings.json. False: it is finished.
bool claim_folder(const std::filesystem::path& folder, const Settings&, bool resume);

}  // namespace horner::train

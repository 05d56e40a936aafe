// The start of a run: its model and its folder.
#pragma once

#include <filesystem>

#include "nn/checkpoint.h"
#include "train/settings.h"

namespace horner::train {

// A randomly initialized model of a preset or a config.json, or the weights of a Hugging Face
// folder; with the attention and the fields of config.json from the settings.
nn::Model start_model(const Settings&);

// Throws if `folder` has a settings.json that differs from `now` in a setting that cannot change.
void check_same_run(const std::filesystem::path& folder, const Settings& now, bool fixed_steps);

// Throws unless a run can start or resume in `folder`; writes settings.json. Returns false if the
// run is finished.
bool claim_folder(const std::filesystem::path& folder, const Settings&, bool resume);

}  // namespace horner::train

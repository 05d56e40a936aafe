// The start of a run: its model and its folder.
#pragma once

#include <filesystem>

#include "nn/checkpoint.h"
#include "train/comm.h"
#include "train/settings.h"
#include "train/source.h"

namespace horner::train {

// A randomly initialized model of a preset or a config.json, or the weights of a Hugging Face
// folder; with the attention and the fields of config.json from the settings.
nn::Model start_model(const Settings&);

nn::ModelConfig start_config(const Settings&);  // of that model

// Throws on a rank whose settings or data are not those of rank 0, and names the first that
// differs. Threads and the paths of the data are a machine's own.
void check_same(const Group&, const Settings&, const Source&);

// Throws unless the model can be trained with these lengths, and by so many ranks per sequence.
void check_model(const Settings&, const nn::ModelConfig&);

enum class Begin { start, resume, either };  // either: resume if there is a run, otherwise start

// The file that shows that a run has begun in `folder`: a checkpoint, metrics.jsonl with a line, or
// result.json; "" if there is none. A folder without one is unused, whatever its settings.json
// says.
std::string trace_of(const std::filesystem::path& folder);

// Throws unless a run can begin in `folder` in this way. An error names what is missing.
void check_folder(const std::filesystem::path& folder, Begin);

// The same, and throws if the folder's run differs from `s` in a setting that cannot change, or has
// done more steps. Writes nothing. Returns false if the run is finished.
bool check_run(const std::filesystem::path& folder, const Settings& s, Begin);

}  // namespace horner::train

#include "cli/model.h"

#include <ATen/ATen.h>

#include "core/check.h"
#include "nn/checkpoint.h"
#include "train/checkpoint.h"

namespace horner::cli {

namespace fs = std::filesystem;

fs::path model_folder(const fs::path& given) {
  horner::check(fs::is_directory(given), "no model folder '", given.string(),
                "'; expected a Hugging Face folder or a run of 'horner train'");
  if (fs::exists(given / "config.json")) return given;
  if (const auto newest = train::newest_checkpoint(given)) return *newest;
  horner::check(!fs::exists(given / "settings.json"), "the run in '", given.string(),
                "' has no checkpoint: it has not saved one yet, or a study removed it "
                "(--keep-weights keeps them)");
  fail("'", given.string(), "' is not a model: it has neither a config.json nor a checkpoint");
}

nn::Model load_model(const fs::path& folder, at::Device device, at::ScalarType dtype) {
  nn::Model m = nn::load_model(folder);
  for (const nn::Slot& s : nn::slots(m))
    *s.at = s.at->to(device, dtype == at::ScalarType::Undefined ? s.at->scalar_type() : dtype);
  if (m.config.tied) m.head = m.embedding;
  return m;
}

}  // namespace horner::cli

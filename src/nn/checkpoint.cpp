#include "nn/checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>

#include "core/check.h"
#include "files/checksums.h"
#include "files/tensors_file.h"

namespace horner::nn {

namespace fs = std::filesystem;

// Without a seed every tensor must be there.
static Model load(const fs::path& folder, const ModelConfig& config, std::optional<uint64_t> seed) {
  if (fs::exists(folder / files::kChecksums)) {
    const std::string damage = files::damage_of(folder, [](const std::string& name) {
      return name == "config.json" || name.starts_with("model");
    });
    check(damage.empty(), folder.string(), " is damaged: ", damage);
  }
  Model m{config};
  const files::TensorsFile file = files::load_tensors(folder);
  const std::vector<Slot> all = slots(m);
  std::map<std::string, int64_t> rows, taken;  // of stored tensors; several slots may share one
  for (const Slot& s : all) rows[s.name] += s.shape[0];
  for (const Slot& s : all) {
    auto found = file.tensors.find(s.name);
    const size_t dot = s.name.find('.');
    if (found == file.tensors.end() && s.at != &m.head)  // saved without its head
      found = file.tensors.find(s.name.substr(dot + 1));
    if (seed && found == file.tensors.end() && is_of_variant(s)) {
      *s.at = random_start(s, *seed).to(m.embedding.scalar_type());
      continue;
    }
    check(found != file.tensors.end(), folder.string(), ": missing tensor '", s.name,
          "', which config.json requires; both files must be of one model");
    at::Tensor x = found->second;
    std::vector<int64_t> shape = s.shape;
    shape[0] = rows[s.name];
    if (s.transposed) std::ranges::reverse(shape);
    check(x.sizes() == at::IntArrayRef(shape), folder.string(), ": tensor '", s.name,
          "' must have shape ", at::IntArrayRef(shape), ", got ", x.sizes());
    check(at::isFloatingType(x.scalar_type()), folder.string(), ": tensor '", s.name,
          "' must have a floating-point dtype, got ", x.scalar_type());
    int64_t& row = taken[s.name];
    x = (s.transposed ? x.t() : x).narrow(0, row, s.shape[0]);
    row += s.shape[0];
    *s.at = s.transposed ? x.contiguous() : x;
  }
  if (m.config.tied) m.head = m.embedding;
  return m;
}

Model load_model(const fs::path& folder) {
  return load(folder, model_config(files::read_json(folder / "config.json")), std::nullopt);
}

Model load_model(const fs::path& folder, const ModelConfig& config, uint64_t seed) {
  return load(folder, config, seed);
}

void save_model(const Model& model, const fs::path& folder) {
  fs::create_directories(folder);
  Model m = model;
  files::TensorsFile file;
  file.metadata["format"] = "pt";
  for (const Slot& s : slots(m)) {
    const at::Tensor x = s.transposed ? s.at->detach().t().contiguous() : s.at->detach();
    at::Tensor& stored = file.tensors[s.name];
    stored = stored.defined() ? at::cat({stored, x}, s.transposed ? 1 : 0) : x;
  }
  std::vector<at::Tensor> kept;
  files::safetensors::write_sharded(folder, files::arrays_of(file, kept));
  Json config = m.config.json;
  config["dtype"] = m.embedding.scalar_type() == at::kBFloat16 ? "bfloat16"
                    : m.embedding.scalar_type() == at::kHalf   ? "float16"
                                                               : "float32";
  files::write_json(folder / "config.json", config);
}

}  // namespace horner::nn
